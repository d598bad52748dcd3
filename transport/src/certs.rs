//! Certificates: a cluster's authority, its nodes' certificates, and the TLS settings that use them.
//!
//! Owns: the files of a certificate folder, and what a link demands of them. Does not own: how a certificate names a
//! node (`names`), connections.
//!
//! ```text
//! ca.pem          the authority, everywhere       ca.key      signs nodes; keep it off them
//! NODE.pem        one node's certificate          NODE.key    its key, on that node only, mode 0600
//! ```
//! On a node the pair may also be called `node.pem` and `node.key`.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use time::{Duration, OffsetDateTime};

use crate::names::{cluster_dns_name, is_name, is_valid_for, node_dns_name, proves};

/// How long authorities and certificates are valid. An expired certificate takes a running cluster apart, and whoever
/// can read a node's key can read its memory. Hence a long validity, and renewal by issuing again.
const VALID_DAYS: i64 = 3650;

/// How far back validity begins, in days. Clocks are minutes apart, sometimes hours, and a certificate must be valid on
/// a node that is behind.
const BACKDATED_DAYS: i64 = 1;

/// The longest file that is read: a chain of several certificates has some 10 KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Prefix of the line before the authority's certificate that names the cluster, so that callers need not name it
/// again. Readers of PEM skip this line.
const CLUSTER_LINE: &str = "Tidemark cluster: ";

/// Why certificates could not be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertError {
    /// The file exists. Replacing it would cut off every node that trusts the old one.
    #[error("{} exists already; remove it if it is to be replaced", .path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file could not be read or written.
    #[error("{doing} {} failed", .path.display())]
    File {
        /// Reading or writing.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The content of a file is wrong.
    #[error("{}: {what}", .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The defect.
        what: String,
    },
    /// A name that no node or cluster can have.
    #[error("`{name}` is no name (1 to 64 letters, digits, '.', '_' or '-', the first no '.' or '-')")]
    Name {
        /// The name.
        name: String,
    },
    /// An additional name that a certificate cannot hold.
    #[error("`{name}` is neither an address nor a host's name")]
    San {
        /// The name.
        name: String,
    },
    /// The cryptographic library could not make a certificate.
    #[error("making a certificate for {name} failed")]
    Make {
        /// The node or cluster that the certificate was for.
        name: String,
        /// The library's error.
        source: rcgen::Error,
    },
}

/// Makes a cluster's authority: `ca.pem` and `ca.key` (mode 0600) in `folder`, which is created when missing.
///
/// # Errors
/// An existing authority is not replaced.
pub fn init(folder: &Path, cluster: &str) -> Result<(), CertError> {
    named(cluster)?;
    fs::create_dir_all(folder).map_err(|source| failed("making the folder", folder, source))?;
    let made = |source| CertError::Make { name: cluster.to_owned(), source };
    let key = KeyPair::generate().map_err(made)?;
    let certificate = authority(cluster)?.self_signed(&key).map_err(made)?;
    write_new(&folder.join("ca.key"), 0o600, &key.serialize_pem())?;
    write_new(&folder.join("ca.pem"), 0o644, &format!("{CLUSTER_LINE}{cluster}\n{}", certificate.pem()))
}

/// Makes the certificate of `node`, signed by the authority in `folder`: `NODE.pem` and `NODE.key` (mode 0600) there.
/// `sans` are further addresses and host names for which the certificate is valid. Returns the paths of both files. An
/// earlier certificate of the node stays trusted until it expires.
///
/// # Errors
/// Existing files of that node are not replaced.
pub fn issue(folder: &Path, node: &str, sans: &[String]) -> Result<(PathBuf, PathBuf), CertError> {
    named(node)?;
    if node == "ca" {
        // The node's key would be the authority's.
        return Err(CertError::Exists { path: folder.join("ca.pem") });
    }
    let (authority_path, key_path) = (folder.join("ca.pem"), folder.join("ca.key"));
    let text = read(&authority_path)?;
    let cluster = text.lines().find_map(|line| line.strip_prefix(CLUSTER_LINE)).ok_or_else(|| {
        content(&authority_path, format!("no line `{CLUSTER_LINE}…`; it was not made by `certs init`"))
    })?;
    check_cluster(&authority_path, &first_certificate(&authority_path, &text)?, cluster)?;
    let key = KeyPair::from_pem(&read(&key_path)?).map_err(|error| content(&key_path, error.to_string()))?;
    let issuer = Issuer::new(authority(cluster)?, key);

    let made = |source| CertError::Make { name: node.to_owned(), source };
    let mut params =
        CertificateParams::new([node_dns_name(node), cluster_dns_name(cluster)]).map_err(made)?;
    for san in sans {
        params.subject_alt_names.push(match san.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) if rustls::pki_types::DnsName::try_from(san.as_str()).is_ok() => {
                SanType::DnsName(san.as_str().try_into().map_err(|_| CertError::San { name: san.clone() })?)
            }
            Err(_) => return Err(CertError::San { name: san.clone() }),
        });
    }
    params.distinguished_name.push(DnType::CommonName, node);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    validity(&mut params);
    let key = KeyPair::generate().map_err(made)?;
    let certificate = params.signed_by(&key, &issuer).map_err(made)?;
    let (certificate_path, key_path) =
        (folder.join(format!("{node}.pem")), folder.join(format!("{node}.key")));
    write_new(&key_path, 0o600, &key.serialize_pem())?;
    write_new(&certificate_path, 0o644, &certificate.pem())?;
    Ok((certificate_path, key_path))
}

fn authority(cluster: &str) -> Result<CertificateParams, CertError> {
    let mut params = CertificateParams::new([cluster_dns_name(cluster)])
        .map_err(|source| CertError::Make { name: cluster.to_owned(), source })?;
    params.distinguished_name.push(DnType::CommonName, format!("Tidemark {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    validity(&mut params);
    Ok(params)
}

fn validity(params: &mut CertificateParams) {
    let now = OffsetDateTime::from(SystemTime::now());
    params.not_before = now - Duration::days(BACKDATED_DAYS);
    params.not_after = now + Duration::days(VALID_DAYS);
}

/// Credentials of one node's connections: its certificate, and the authority that other nodes must have.
#[derive(Debug, Clone)]
pub struct Certs {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Certs {
    /// Reads `ca.pem` and `NODE.pem`, `NODE.key` (else `node.pem`, `node.key`) from a folder, and checks that they
    /// belong to this node and this cluster. A mistake thus shows at the start and not at the first peer.
    ///
    /// # Errors
    /// A file that is missing, that cannot be read, or that belongs to another node or cluster.
    pub fn load(folder: &Path, cluster: &str, node: &str) -> Result<Self, CertError> {
        named(cluster)?;
        named(node)?;
        let authority_path = folder.join("ca.pem");
        let authority = first_certificate(&authority_path, &read(&authority_path)?)?;
        check_cluster(&authority_path, &authority, cluster)?;
        let own = folder.join(format!("{node}.pem"));
        let certificate_path = if own.exists() { own } else { folder.join("node.pem") };
        let key_path = certificate_path.with_file_name(if certificate_path.ends_with("node.pem") {
            "node.key".to_owned()
        } else {
            format!("{node}.key")
        });
        let chain: Vec<CertificateDer<'static>> =
            CertificateDer::pem_slice_iter(read(&certificate_path)?.as_bytes())
                .collect::<Result<_, _>>()
                .map_err(|error| content(&certificate_path, error.to_string()))?;
        let first = chain
            .first()
            .ok_or_else(|| content(&certificate_path, "there is no certificate in it".to_owned()))?;
        proves(first, cluster, node).map_err(|error| content(&certificate_path, error.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(read(&key_path)?.as_bytes())
            .map_err(|error| content(&key_path, error.to_string()))?;
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(|error| content(&authority_path, error.to_string()))?;
        Self::configure(roots, chain, key).map_err(|what| content(&certificate_path, what))
    }

    fn configure(
        roots: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, String> {
        // A named provider, not the process's default: whoever sets the default must not change who may speak here.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let versions = &[&rustls::version::TLS13];
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|error| error.to_string())?;
        let text = |error: rustls::Error| error.to_string();
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(text)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(text)?;
        // Every connection shows its certificate: there are few, and they last.
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(text)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(text)?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn named(name: &str) -> Result<(), CertError> {
    if is_name(name) { Ok(()) } else { Err(CertError::Name { name: name.to_owned() }) }
}

fn check_cluster(path: &Path, authority: &CertificateDer<'_>, cluster: &str) -> Result<(), CertError> {
    match is_valid_for(authority, &cluster_dns_name(cluster)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(content(path, format!("it is not the authority of the cluster `{cluster}`"))),
        Err(error) => Err(content(path, error.to_string())),
    }
}

fn first_certificate(path: &Path, text: &str) -> Result<CertificateDer<'static>, CertError> {
    CertificateDer::from_pem_slice(text.as_bytes()).map_err(|error| content(path, error.to_string()))
}

fn content(path: &Path, what: String) -> CertError {
    CertError::Content { path: path.to_owned(), what }
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> CertError {
    CertError::File { doing, path: path.to_owned(), source }
}

fn read(path: &Path) -> Result<String, CertError> {
    let reading = |source| failed("reading", path, source);
    let bytes = fs::metadata(path).map_err(reading)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(content(
            path,
            format!("{bytes} bytes are more than a certificate has ({FILE_BYTES_MAX})"),
        ));
    }
    fs::read_to_string(path).map_err(reading)
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), CertError> {
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(mode).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(CertError::Exists { path: path.to_owned() });
        }
        opened => opened.map_err(|source| failed("making", path, source))?,
    };
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|source| failed("writing", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_node_loads_what_was_issued_to_it_and_nobody_elses() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        init(folder, "blue").expect("an authority");
        let (_, key) =
            issue(folder, "A.1", &["10.0.0.1".into(), "host.example".into()]).expect("a certificate");
        issue(folder, "b", &[]).expect("another");
        Certs::load(folder, "blue", "A.1").expect("it is A.1's");
        for private in [key, folder.join("ca.key")] {
            assert_eq!(fs::metadata(private).expect("a key").permissions().mode() & 0o777, 0o600);
        }
        let wrong_cluster = Certs::load(folder, "red", "b").expect_err("of another cluster");
        assert!(wrong_cluster.to_string().contains("`red`"), "{wrong_cluster}");
        fs::rename(folder.join("b.pem"), folder.join("node.pem")).expect("renamed");
        fs::rename(folder.join("b.key"), folder.join("node.key")).expect("renamed");
        Certs::load(folder, "blue", "b").expect("node.pem is b's");
        let wrong_node = Certs::load(folder, "blue", "c").expect_err("node.pem is b's");
        assert!(wrong_node.to_string().contains("`c`"), "{wrong_node}");
    }

    #[test]
    fn nothing_that_is_there_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        init(folder, "blue").expect("an authority");
        assert!(matches!(init(folder, "blue"), Err(CertError::Exists { .. })));
        issue(folder, "a", &[]).expect("a certificate");
        assert!(matches!(issue(folder, "a", &[]), Err(CertError::Exists { .. })));
        assert!(matches!(issue(folder, "ca", &[]), Err(CertError::Exists { .. })));
        assert!(matches!(issue(folder, "../a", &[]), Err(CertError::Name { .. })));
        assert!(matches!(issue(folder, "b", &["a b".into()]), Err(CertError::San { .. })));
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        init(folder, "blue").expect("an authority");
        for node in ["a", "b"] {
            issue(folder, node, &[]).expect("a certificate");
        }
        fs::copy(folder.join("b.key"), folder.join("a.key")).expect("copied");
        assert!(matches!(Certs::load(folder, "blue", "a"), Err(CertError::Content { .. })));
        fs::write(folder.join("a.key"), "no key").expect("written");
        assert!(matches!(Certs::load(folder, "blue", "a"), Err(CertError::Content { .. })));
    }
}
