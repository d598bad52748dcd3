//! The settings of several nodes: the etcd that names the coordinator, where copies lie, how fast they are made, how they travel, and the
//! wait for a silent node.
//!
//! Owns: the keys of `[etcd]`, `[placement]`, `[replication]`, `[links]` and `[members]`. Does not own: the rules that use them
//! (`protocol`).

use super::SettingsError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tidemark_protocol::label::Labels;
use tidemark_protocol::membership::Patience;
use tidemark_protocol::placement::{DOMAIN_LABEL, Rules, Scheme, Scope};

/// Prefix by which `lease` names an etcd without TLS: the older spelling of `http://` in `etcd.url`.
pub(super) const LEASE_IN_ETCD: &str = "etcd://";

/// Longest wait for a node: a day.
const PATIENCE_S_MAX: f64 = 86_400.0;

/// The etcd that names the coordinator, and how this node reaches it. Each node uses its own values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdSettings {
    pub url: Option<String>,
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    pub ca: Option<PathBuf>,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

impl EtcdSettings {
    /// Checks the keys against each other, and against `lease`, whose older spelling names an etcd, too.
    pub(super) fn validate(&self, lease: Option<&str>) -> Result<(), SettingsError> {
        let refuse = |key, value: String, rule| Err(SettingsError::Value { key, value, rule });
        let older = lease.filter(|lease| lease.starts_with(LEASE_IN_ETCD));
        if let Some(url) = &self.url {
            let rest = ["http://", "https://"].iter().find_map(|scheme| url.strip_prefix(scheme));
            if rest.is_none_or(str::is_empty) {
                return refuse("etcd.url (--etcd)", format!("{url:?}"), "http[s]://HOST:PORT[,...]/PREFIX");
            }
            if let Some(lease) = lease {
                let rule = "left out where etcd.url (--etcd) is set: the lease lies in that etcd";
                return refuse("node.lease (--lease)", format!("{lease:?}"), rule);
            }
        }
        let set = |path: &Option<PathBuf>| path.is_some();
        let named = [
            ("etcd.user", self.user.is_some()),
            ("etcd.password_file", set(&self.password_file)),
            ("etcd.ca", set(&self.ca)),
            ("etcd.cert", set(&self.cert)),
            ("etcd.key", set(&self.key)),
        ];
        if let Some((key, _)) =
            named.into_iter().find(|(_, set)| *set && self.url.is_none() && older.is_none())
        {
            return refuse(key, "set".to_owned(), "given together with etcd.url (--etcd)");
        }
        if self.user.is_some() != self.password_file.is_some() {
            let key = if self.user.is_some() { "etcd.password_file" } else { "etcd.user" };
            return refuse(
                key,
                "not set".to_owned(),
                "given together with the other of user and password_file",
            );
        }
        if self.user.as_deref() == Some("") {
            return refuse("etcd.user", "empty".to_owned(), "the name of a user in etcd");
        }
        if set(&self.cert) != set(&self.key) {
            let key = if set(&self.cert) { "etcd.key" } else { "etcd.cert" };
            return refuse(key, "not set".to_owned(), "given together with the other of cert and key");
        }
        let encrypted = self.url.as_deref().is_some_and(|url| url.starts_with("https://"));
        if let Some((key, _)) = named[2..].iter().find(|(_, set)| *set && !encrypted) {
            return refuse(key, "set".to_owned(), "left out, or given with https:// in etcd.url (--etcd)");
        }
        Ok(())
    }
}

/// Choice of partners. Only the coordinator's values are used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlacementSettings {
    pub scheme: Scheme,
    pub domain: String,
    pub scope: Option<String>,
}

impl Default for PlacementSettings {
    fn default() -> Self {
        Self { scheme: Scheme::default(), domain: DOMAIN_LABEL.to_owned(), scope: None }
    }
}

impl PlacementSettings {
    /// Returns the rules for the choice of partners.
    #[must_use]
    pub fn rules(&self) -> Rules {
        let apart = || Scope::Apart(self.domain.clone());
        Rules { scheme: self.scheme, scope: self.scope.clone().map_or_else(apart, Scope::Within) }
    }

    pub(super) fn validate(&self) -> Result<(), SettingsError> {
        let labels = [("placement.domain", Some(&self.domain)), ("placement.scope", self.scope.as_ref())];
        for (key, label) in labels {
            let Some(label) = label else { continue };
            if Labels::try_from(BTreeMap::from([(label.clone(), "x".to_owned())])).is_err() {
                let rule = "the key of a label, such as rack: 1 to 64 letters, digits, '.', '_', '-' or '/'";
                return Err(SettingsError::Value { key, value: format!("{label:?}"), rule });
            }
        }
        Ok(())
    }
}

/// Copies of this node's files to other nodes. Each node uses its own values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicationSettings {
    pub paced: bool,
}

impl Default for ReplicationSettings {
    fn default() -> Self {
        Self { paced: true }
    }
}

/// Connections between nodes with certificates. Each node uses its own values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinksSettings {
    pub encrypt_bulk: bool,
}

impl Default for LinksSettings {
    fn default() -> Self {
        Self { encrypt_bulk: true }
    }
}

/// Time limits for nodes that do not answer. Only the coordinator's values are used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MembersSettings {
    pub cut_off_s: f64,
    pub for_good_s: f64,
}

impl Default for MembersSettings {
    fn default() -> Self {
        let seconds = |ms: u64| std::time::Duration::from_millis(ms).as_secs_f64();
        let Patience { cutoff_ms, for_good_ms } = Patience::default();
        Self { cut_off_s: seconds(cutoff_ms), for_good_s: seconds(for_good_ms) }
    }
}

impl MembersSettings {
    /// Returns the time limits for verdicts on members.
    #[must_use]
    pub fn patience(&self) -> Patience {
        let ms = |seconds: f64| {
            let duration = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
            u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
        };
        Patience { cutoff_ms: ms(self.cut_off_s), for_good_ms: ms(self.for_good_s) }
    }

    pub(super) fn validate(&self) -> Result<(), SettingsError> {
        for (key, seconds) in [("members.cut_off_s", self.cut_off_s), ("members.for_good_s", self.for_good_s)]
        {
            if !(1.0..=PATIENCE_S_MAX).contains(&seconds) {
                return Err(SettingsError::Value {
                    key,
                    value: seconds.to_string(),
                    rule: "1 to 86400 seconds",
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_patience_are_what_the_file_says() {
        let settings: PlacementSettings =
            serde_json::from_str(r#"{"scheme":"pair","domain":"switch"}"#).unwrap();
        assert_eq!(settings.rules(), Rules { scheme: Scheme::Pair, scope: Scope::Apart("switch".into()) });
        let within: PlacementSettings = serde_json::from_str(r#"{"scope":"rack"}"#).unwrap();
        assert_eq!(within.rules(), Rules { scheme: Scheme::Ring, scope: Scope::Within("rack".into()) });
        assert_eq!(PlacementSettings::default().rules(), Rules::default());
        assert_eq!(MembersSettings::default().patience(), Patience::default());
        let short = MembersSettings { for_good_s: 2.5, ..MembersSettings::default() };
        assert_eq!(short.patience().for_good_ms, 2_500);
        assert!(serde_json::from_str::<PlacementSettings>(r#"{"scheme":"group:4+1"}"#).is_err());
    }

    #[test]
    fn copies_are_paced_unless_somebody_says_otherwise() {
        let of = serde_json::from_str::<ReplicationSettings>;
        assert!(of("{}").unwrap().paced);
        assert!(!of(r#"{"paced":false}"#).unwrap().paced);
        assert!(of(r#"{"pace":false}"#).unwrap_err().to_string().contains("pace"));
    }

    #[test]
    fn files_are_encrypted_on_their_way_unless_the_operator_says_otherwise() {
        let of = serde_json::from_str::<LinksSettings>;
        assert!(of("{}").unwrap().encrypt_bulk && crate::settings::Settings::default().links.encrypt_bulk);
        assert!(!of(r#"{"encrypt_bulk":false}"#).unwrap().encrypt_bulk);
        assert!(of(r#"{"encrypt":false}"#).unwrap_err().to_string().contains("encrypt"));
    }

    #[test]
    fn what_is_no_label_and_no_time_is_refused_by_its_key() {
        let bad = PlacementSettings { domain: "two words".into(), ..PlacementSettings::default() };
        let said = bad.validate().unwrap_err().to_string();
        assert!(said.contains("placement.domain") && said.contains("two words"), "{said}");
        let bad = PlacementSettings { scope: Some(String::new()), ..PlacementSettings::default() };
        assert!(bad.validate().unwrap_err().to_string().contains("placement.scope"));
        for seconds in [0.0, -1.0, f64::NAN, 1e9] {
            let bad = MembersSettings { for_good_s: seconds, ..MembersSettings::default() };
            assert!(bad.validate().unwrap_err().to_string().contains("members.for_good_s"), "{seconds}");
        }
        assert!(
            MembersSettings::default().validate().is_ok() && PlacementSettings::default().validate().is_ok()
        );
    }
}
