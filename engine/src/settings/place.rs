//! Checks of the form of paths, and of addresses that other nodes use.
//!
//! Owns: these forms. Does not own: whether the path or the host exists (their users check), which keys have them (`settings`).

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

pub(super) const PATH_RULE: &str = "the path of a directory: not empty, and without NUL bytes";

/// Whether the kernel accepts the bytes as a path.
pub(super) fn is_path(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    !bytes.is_empty() && !bytes.contains(&0)
}

/// Whether the path is another spelling of `/`. Links are not followed.
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

/// Whether the text is `HOST:PORT`, with an IPv6 address in brackets. The host need not exist.
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
