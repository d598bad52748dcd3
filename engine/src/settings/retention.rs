//! The settings of retention: which versions Tier-3 keeps of each run.
//!
//! Owns: the keys of `[retention]`. Does not own: the rules that use them (`protocol::retention`), the names of runs (`runs`).

use super::{SettingsError, runs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::retention::{Best, Policy};

/// Versions to keep in Tier-3: of runs that are listed by `runs`, of all others by `all`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionSettings {
    #[serde(flatten)]
    pub all: RunRetention,
    #[serde(deserialize_with = "runs::of_retention")]
    pub runs: BTreeMap<RunPath, RunRetention>,
}

/// Versions to keep of one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunRetention {
    pub keep_last: Option<u64>,
    pub keep_every_steps: Option<u64>,
    pub keep_every_s: Option<u64>,
    pub ttl_s: Option<u64>,
    pub keep_best: Option<u64>,
    pub best: Best,
    pub follow_removals: bool,
}

impl RunRetention {
    fn policy(&self) -> Policy {
        let ns = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000_000);
        Policy {
            keep_last: self.keep_last,
            keep_every_steps: self.keep_every_steps,
            keep_every_ns: self.keep_every_s.map(ns),
            ttl_ns: self.ttl_s.map(ns),
            keep_best: self.keep_best,
            best: self.best,
            honour_removals: self.follow_removals,
        }
    }

    /// Returns the key of the first rule that would keep nothing. Such a rule has an effect: if any rule is set, versions that
    /// no rule keeps are deleted.
    fn keeps_nothing(&self) -> Option<&'static str> {
        let rules = [
            ("retention.keep_last", self.keep_last),
            ("retention.keep_every_steps", self.keep_every_steps),
            ("retention.keep_every_s", self.keep_every_s),
            ("retention.ttl_s", self.ttl_s),
            ("retention.keep_best", self.keep_best),
        ];
        rules.into_iter().find(|(_, value)| *value == Some(0)).map(|(key, _)| key)
    }
}

impl RetentionSettings {
    pub(super) fn validate(&self) -> Result<(), SettingsError> {
        let rule = "at least 1; leave the key out to have no such rule";
        if let Some(key) = self.all.keeps_nothing() {
            return Err(SettingsError::Value { key, value: "0".to_owned(), rule });
        }
        for (run, own) in &self.runs {
            if let Some(key) = own.keeps_nothing() {
                let value = format!("0 for the run {run} in retention.runs");
                return Err(SettingsError::Value { key, value, rule });
            }
        }
        Ok(())
    }

    /// Returns the policy of one run.
    #[must_use]
    pub fn policy_of(&self, run: &RunPath) -> Policy {
        self.runs.get(run).unwrap_or(&self.all).policy()
    }

    /// Whether no version is ever retired.
    #[must_use]
    pub fn keeps_everything(&self) -> bool {
        let nothing =
            |run: &RunRetention| Policy { best: Best::default(), ..run.policy() } == Policy::default();
        self.runs.values().chain([&self.all]).all(nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{CompressionSettings, Settings};
    use tidemark_protocol::path::RelPath;

    fn run(text: &str) -> RunPath {
        text.parse().unwrap()
    }

    #[test]
    fn a_misspelt_key_of_one_run_is_refused_as_one_of_all_runs() {
        let read = serde_json::from_str::<RetentionSettings>;
        for text in [r#"{"keep_lats":3}"#, r#"{"runs":{"team/run7":{"keep_lats":3}}}"#] {
            assert!(read(text).unwrap_err().to_string().contains("keep_lats"), "{text}");
        }
        let settings = read(r#"{"keep_last":3,"runs":{"team/run7":{"ttl_s":9}}}"#).unwrap();
        assert_eq!((settings.all.keep_last, settings.runs[&run("team/run7")].ttl_s), (Some(3), Some(9)));
    }

    #[test]
    fn a_key_that_is_no_runs_path_is_refused_by_its_table() {
        for key in ["/r", "r/", "../r", "a//b", "."] {
            let text = format!(r#"{{"runs":{{"{key}":{{"keep_last":10}}}}}}"#);
            let said = serde_json::from_str::<RetentionSettings>(&text).unwrap_err().to_string();
            assert!(
                said.contains(&format!("retention.runs.{key:?}")) && said.contains("team/run7"),
                "{said}"
            );
            let text = format!(r#"{{"runs":{{"{key}":{{"codec":"zstd"}}}}}}"#);
            let said = serde_json::from_str::<CompressionSettings>(&text).unwrap_err().to_string();
            assert!(said.contains(&format!("compression.runs.{key:?}")), "{said}");
        }
        let text = r#"{"keep_last":3,"runs":{"_":{"keep_last":5},"team/run7":{"keep_last":9}}}"#;
        let settings: RetentionSettings = serde_json::from_str(text).unwrap();
        let kept = |of: &RunPath| settings.policy_of(of).keep_last;
        assert_eq!(kept(&RunPath::root()), Some(5), "the mount itself");
        assert_eq!((kept(&run("team/run7")), kept(&run("team"))), (Some(9), Some(3)));
        let text = r#"{"runs":{"":{"keep_last":5},"a-team/v1.2":{"keep_last":6}}}"#;
        let plain: RetentionSettings = serde_json::from_str(text).unwrap();
        let named = |path: &str| RunPath::new(RelPath::new(path).unwrap()).unwrap();
        assert_eq!(plain.policy_of(&RunPath::root()).keep_last, Some(5));
        assert_eq!(plain.policy_of(&named("a-team/v1.2")).keep_last, Some(6), "as a person writes it");
        let twice = r#"{"runs":{"":{"keep_last":5},"_":{"keep_last":6}}}"#;
        let said = serde_json::from_str::<RetentionSettings>(twice).unwrap_err().to_string();
        assert!(said.contains("another key"), "{said}");
        let written = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<RetentionSettings>(&written).unwrap(), settings);
    }

    #[test]
    fn a_rule_that_keeps_nothing_is_refused() {
        let read = |text: &str| serde_json::from_str::<Settings>(text).unwrap().validate();
        for key in ["keep_last", "keep_every_steps", "keep_every_s", "ttl_s", "keep_best"] {
            let said = read(&format!(r#"{{"retention":{{"{key}":0}}}}"#)).unwrap_err().to_string();
            assert!(said.contains(key) && said.contains("leave the key out"), "{said}");
            let said = read(&format!(r#"{{"retention":{{"runs":{{"r":{{"{key}":0}}}}}}}}"#))
                .unwrap_err()
                .to_string();
            assert!(
                said.contains(key) && said.contains("retention.runs") && said.contains("run r"),
                "{said}"
            );
            read(&format!(r#"{{"retention":{{"{key}":1}}}}"#)).unwrap();
        }
    }
}
