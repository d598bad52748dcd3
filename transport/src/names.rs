//! How a certificate names a node and its cluster.
//!
//! Owns: the one-to-one mapping from names to DNS names, and asking a certificate for them. Does not own: making certificates (`certs`).
//!
//! A certificate belongs to a node when it is valid for `NODE.node.tidemark`, and to a cluster when it is also valid for
//! `CLUSTER.cluster.tidemark`. Both are DNS subject alternative names, so that any TLS library can check them. DNS knows no capitals and
//! few signs. A name that is not a plain label is therefore written as `x--` and its bytes in hexadecimal, cut into labels; else the
//! certificate of `A` would be valid for `a`.

use rustls::pki_types::{CertificateDer, ServerName};

use crate::error::Mismatch;

/// The longest name of a node or a cluster.
pub(crate) const NAME_BYTES_MAX: usize = 64;

/// DNS allows 63 bytes in a label.
const LABEL_BYTES_MAX: usize = 63;

/// Prefix of a label that holds hexadecimal digits, as `xn--` is for other writings.
const ENCODED: &str = "x--";

/// Returns whether `text` has 1 to 64 ASCII letters, digits, `.`, `_` and `-`, and the first is no `.` or `-`: so a name is also a file
/// name.
pub(crate) fn is_name(text: &str) -> bool {
    let sign = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    text.len() <= NAME_BYTES_MAX
        && text.bytes().all(sign)
        && text.bytes().next().is_some_and(|first| !matches!(first, b'.' | b'-'))
}

/// Returns the DNS name for which a node's certificate is valid.
pub(crate) fn node_dns_name(node: &str) -> String {
    format!("{}{NODE_ENDING}", label(node))
}

/// Returns the DNS name for which the certificates of a cluster's nodes, and of its authority, are valid.
pub(crate) fn cluster_dns_name(cluster: &str) -> String {
    format!("{}.cluster.tidemark", label(cluster))
}

const NODE_ENDING: &str = ".node.tidemark";

fn label(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = (1..=LABEL_BYTES_MAX).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !name.starts_with(ENCODED);
    if is_label {
        return name.to_owned();
    }
    let mut text = ENCODED.to_owned();
    let mut room = LABEL_BYTES_MAX - ENCODED.len();
    for byte in name.bytes() {
        if room < 2 {
            text.push('.');
            room = LABEL_BYTES_MAX;
        }
        text.push_str(&format!("{byte:02x}"));
        room -= 2;
    }
    text
}

/// Returns the DNS name that a node must prove when this node calls it.
pub(crate) fn server_name(node: &str) -> Result<ServerName<'static>, Mismatch> {
    ServerName::try_from(node_dns_name(node))
        .map_err(|_| Mismatch::Certificate(format!("`{node}` cannot stand in a certificate")))
}

/// Checks that a certificate (whose chain was verified) belongs to this node of this cluster.
pub(crate) fn proves(certificate: &CertificateDer<'_>, cluster: &str, node: &str) -> Result<(), Mismatch> {
    for (what, name, dns_name) in
        [("node", node, node_dns_name(node)), ("cluster", cluster, cluster_dns_name(cluster))]
    {
        if !is_valid_for(certificate, &dns_name)? {
            return Err(Mismatch::Certificate(format!(
                "it is not valid for the {what} `{name}` ({dns_name})"
            )));
        }
    }
    Ok(())
}

/// Returns whether a certificate is valid for a DNS name; an error when the certificate cannot be read.
pub(crate) fn is_valid_for(certificate: &CertificateDer<'_>, dns_name: &str) -> Result<bool, Mismatch> {
    let unreadable =
        |error: &dyn std::fmt::Display| Mismatch::Certificate(format!("it cannot be read: {error}"));
    let certificate = webpki::EndEntityCert::try_from(certificate).map_err(|error| unreadable(&error))?;
    let name = ServerName::try_from(dns_name).map_err(|error| unreadable(&error))?;
    Ok(certificate.verify_is_valid_for_subject_name(&name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn plain_names_stay_readable_and_others_are_kept_apart() {
        assert_eq!(node_dns_name("gpu-17"), "gpu-17.node.tidemark");
        assert_eq!(node_dns_name("A"), "x--41.node.tidemark");
        assert_eq!(node_dns_name("a.node"), "x--612e6e6f6465.node.tidemark");
        assert_ne!(node_dns_name("x--41"), node_dns_name("A"));
        for name in ["", ".", "-a", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(!is_name(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn every_name_has_one_valid_dns_name_of_its_own(
            one in "[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", other in "[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
        ) {
            prop_assert!(is_name(&one) && server_name(&one).is_ok());
            prop_assert_eq!(one == other, node_dns_name(&one) == node_dns_name(&other));
            prop_assert!(ServerName::try_from(cluster_dns_name(&one)).is_ok());
        }
    }
}
