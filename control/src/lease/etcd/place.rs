//! The address of an etcd: `http[s]://host:port[,host:port…]/prefix`.
//!
//! Owns: the grammar and its bounds. Does not own: the certificates and the user (`access`), requests (`client`).

use rustls::pki_types::ServerName;
use std::fmt;
use std::str::FromStr;

/// Most members of one etcd; more than nine vote more slowly than they help.
const ENDPOINTS_MAX: usize = 9;
const PREFIX_BYTES_MAX: usize = 256;
/// The default prefix. Several clusters may share one etcd under prefixes of their own; a single cluster need not name
/// one.
const PREFIX: &str = "tidemark";

/// An etcd and a prefix of keys in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdPlace {
    pub(super) tls: bool,
    pub(super) endpoints: Vec<String>,
    prefix: String,
}

/// Why a text is not an address of an etcd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no place in etcd: {reason}; write https://host:port[,host:port]/prefix, or http:// without TLS"
)]
pub struct NotAPlace {
    pub text: String,
    pub reason: &'static str,
}

impl EtcdPlace {
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }
}

impl FromStr for EtcdPlace {
    type Err = NotAPlace;

    fn from_str(text: &str) -> Result<Self, NotAPlace> {
        let refused = |reason| NotAPlace { text: text.chars().take(PREFIX_BYTES_MAX).collect(), reason };
        // `etcd://` is the older spelling, from when there was no TLS.
        let schemes = [("https://", true), ("http://", false), ("etcd://", false)];
        let (rest, tls) = schemes
            .into_iter()
            .find_map(|(scheme, tls)| Some((text.strip_prefix(scheme)?, tls)))
            .ok_or_else(|| refused("it begins with neither https:// nor http://"))?;
        if rest.contains("://") {
            return Err(refused("the scheme stands once, in front of the first host"));
        }
        let (hosts, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        if prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refused("its prefix is not up to 256 plain characters"));
        }
        if hosts.contains('@') {
            return Err(refused("a user stands in the configuration, as [etcd] user and password_file"));
        }
        let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(refused("it has more than nine hosts"));
        }
        if !endpoints.iter().all(|endpoint| is_endpoint(endpoint)) {
            return Err(refused("not each of its hosts is host:port"));
        }
        if tls && !endpoints.iter().all(|endpoint| server_name(endpoint).is_some()) {
            return Err(refused(
                "with https:// each host is an address or a DNS name, as in its certificate",
            ));
        }
        let prefix = if prefix.is_empty() { PREFIX } else { prefix };
        Ok(Self { tls, endpoints, prefix: prefix.to_owned() })
    }
}

fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0) && port.bytes().all(|b| b.is_ascii_digit());
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.len() <= 253 && host.bytes().all(name),
    };
    is_host && is_port
}

/// Returns the name for which the certificate of `endpoint` must be valid: its host.
pub(super) fn server_name(endpoint: &str) -> Option<ServerName<'static>> {
    let (host, _) = endpoint.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(host.to_owned()).ok()
}

impl fmt::Display for EtcdPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}/{}", self.endpoints.join(","), self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_hosts_with_ports_and_a_prefix() {
        let place: EtcdPlace = "https://10.0.0.1:2379,[::1]:2379,etcd-2.example:1/a/b/".parse().unwrap();
        assert_eq!(place.endpoints, ["10.0.0.1:2379", "[::1]:2379", "etcd-2.example:1"]);
        assert!(place.tls);
        assert_eq!(place.key("lease"), "a/b/lease");
        assert_eq!(place.to_string(), "https://10.0.0.1:2379,[::1]:2379,etcd-2.example:1/a/b");
        let plain: EtcdPlace = "http://h:2379".parse().unwrap();
        assert_eq!(plain.key("lease"), "tidemark/lease");
        assert!(!plain.tls);
        assert_eq!("etcd://h:2379/tidemark".parse::<EtcdPlace>().unwrap(), plain, "the older spelling");
    }

    #[test]
    fn the_certificate_is_for_the_host() {
        let names = ["10.0.0.1:2379", "[::1]:2379", "etcd-2.example:1"].map(|endpoint| {
            let name = server_name(endpoint).unwrap();
            (name.to_str().into_owned(), matches!(name, ServerName::IpAddress(_)))
        });
        let expected = [("10.0.0.1", true), ("::1", true), ("etcd-2.example", false)];
        assert_eq!(names, expected.map(|(name, is_address)| (name.to_owned(), is_address)));
    }

    #[test]
    fn what_is_no_place_is_refused_with_the_reason() {
        let many = format!("http://{}/p", ["h:1"; ENDPOINTS_MAX + 1].join(","));
        for (text, reason) in [
            ("h:1/p", "neither https:// nor http://"),
            ("ftp://h:1/p", "neither https:// nor http://"),
            ("http://", "host:port"),
            ("https:///p", "host:port"),
            ("http://h/p", "host:port"),
            ("http://h:0/p", "host:port"),
            ("http://h:+1/p", "host:port"),
            ("http://h:70000", "host:port"),
            ("http://user@h:1/p", "password_file"),
            ("http://h:1,/p", "host:port"),
            ("http://[::g]:1/p", "host:port"),
            ("http://h:1/a b", "256 plain"),
            ("https://h:1,https://i:1/p", "scheme stands once"),
            ("https://-h.:1/p", "DNS name"),
            (&many, "nine"),
        ] {
            let error = text.parse::<EtcdPlace>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("write https://host:port"), "{error}");
        }
    }
}
