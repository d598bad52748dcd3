//! Whether a setting can be a path, or an address that others use.
//!
//! Owns: these forms. Does not own: what is there (whoever uses them looks), which keys have them (`settings`).

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

pub(super) const PATH_RULE: &str = "the path of a directory: not empty, and without NUL bytes";

/// Whether the kernel could take it for a path.
pub(super) fn is_path(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    !bytes.is_empty() && !bytes.contains(&0)
}

/// Whether it is another spelling of `/`. Links are not looked at.
pub(super) fn is_root(path: &Path) -> bool {
    let mut depth = 0_usize;
    for component in path.components() {
        match component {
            Component::Normal(_) => depth += 1,
            Component::ParentDir => depth = depth.saturating_sub(1),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    path.has_root() && depth == 0
}

/// Whether it is `HOST:PORT`, with an IPv6 address in brackets. Whether the host exists is not asked.
pub(super) fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match in_brackets {
        Some(address) => {
            let address = address.split_once('%').map_or(address, |(address, _)| address);
            address.parse::<std::net::Ipv6Addr>().is_ok()
        }
        None => {
            !host.is_empty()
                && host.chars().all(|sign| sign.is_ascii_alphanumeric() || matches!(sign, '.' | '-' | '_'))
        }
    };
    is_host
        && port.bytes().all(|sign| sign.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}
