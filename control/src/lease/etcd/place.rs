//! Where the lease is: `etcd://host:port[,host:port…]/prefix`.
//!
//! Owns: the grammar and its bounds. Does not own: asking anybody (`client`).

use std::fmt;
use std::str::FromStr;

/// Members of one etcd; more than nine vote more slowly than they help.
const ENDPOINTS_MAX: usize = 9;
const PREFIX_BYTES_MAX: usize = 256;
/// Several clusters may share one etcd under prefixes of their own; one alone need not name it.
const PREFIX: &str = "tidemark";

/// An etcd and a prefix of keys in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdPlace {
    pub(super) endpoints: Vec<String>,
    prefix: String,
}

/// Why a text is no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no place in etcd: {reason}; write etcd://host:port[,host:port]/prefix")]
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
        let rest = text.strip_prefix("etcd://").ok_or_else(|| refused("it does not begin with etcd://"))?;
        let (hosts, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        if prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refused("its prefix is not up to 256 plain characters"));
        }
        let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(refused("it has more than nine hosts"));
        }
        if !endpoints.iter().all(|endpoint| is_endpoint(endpoint)) {
            return Err(refused("not each of its hosts is host:port"));
        }
        let prefix = if prefix.is_empty() { PREFIX } else { prefix };
        Ok(Self { endpoints, prefix: prefix.to_owned() })
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

impl fmt::Display for EtcdPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd://{}/{}", self.endpoints.join(","), self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_hosts_with_ports_and_a_prefix() {
        let place: EtcdPlace = "etcd://10.0.0.1:2379,[::1]:2379,etcd-2.example:1/a/b/".parse().unwrap();
        assert_eq!(place.endpoints, ["10.0.0.1:2379", "[::1]:2379", "etcd-2.example:1"]);
        assert_eq!(place.key("lease"), "a/b/lease");
        assert_eq!(place.to_string(), "etcd://10.0.0.1:2379,[::1]:2379,etcd-2.example:1/a/b");
        let plain: EtcdPlace = "etcd://h:2379".parse().unwrap();
        assert_eq!(plain.key("lease"), "tidemark/lease");
    }

    #[test]
    fn what_is_no_place_is_refused_with_the_reason() {
        let many = format!("etcd://{}/p", ["h:1"; ENDPOINTS_MAX + 1].join(","));
        for text in [
            "http://h:1/p",
            "etcd://",
            "etcd:///p",
            "etcd://h/p",
            "etcd://h:0/p",
            "etcd://h:+1/p",
            "etcd://h:70000",
            "etcd://user@h:1/p",
            "etcd://h:1,/p",
            "etcd://[::g]:1/p",
            "etcd://h:1/a b",
            &many,
        ] {
            let error = text.parse::<EtcdPlace>().unwrap_err();
            assert!(error.to_string().contains("write etcd://host:port"), "{error}");
        }
    }
}
