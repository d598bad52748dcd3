//! TLS towards an etcd: the authorities that may have signed its certificate, and this node's own certificate.
//!
//! Owns: reading these files, and reading them again while the daemon runs. Does not own: connections (`http`).

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidemark_engine::settings::EtcdSettings;

/// The longest file that is read: a bundle of all public authorities has some 220 KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Interval at which the files are read again. Client certificates are often renewed some hours before they expire, while a daemon runs for
/// months.
const READ_EVERY: Duration = Duration::from_secs(60);

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("{} cannot be read", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {what}", .path.display())]
    Content { path: PathBuf, what: String },
    #[error(
        "this system has no certificate authorities{why}; name the one that signed etcd's certificate as [etcd] ca"
    )]
    NoAuthorities { why: String },
    #[error("rustls does not take them")]
    Refused { source: rustls::Error },
}

/// The configuration of TLS connections to an etcd.
pub(super) struct Tls {
    files: Files,
    now: Mutex<Now>,
}

#[derive(Debug, Clone)]
struct Files {
    /// The file of the authorities; `None`: the authorities of the system.
    ca: Option<PathBuf>,
    own: Option<(PathBuf, PathBuf)>,
}

struct Now {
    material: Material,
    config: Arc<ClientConfig>,
    read: Instant,
}

/// The content of the files.
#[derive(PartialEq)]
struct Material {
    authorities: Vec<CertificateDer<'static>>,
    own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
}

impl Tls {
    pub(super) fn open(settings: &EtcdSettings) -> Result<Self, CertificateError> {
        let own = settings.cert.clone().zip(settings.key.clone());
        let files = Files { ca: settings.ca.clone(), own };
        let material = files.read()?;
        let config = material.config()?;
        Ok(Self { files, now: Mutex::new(Now { material, config, read: Instant::now() }) })
    }

    /// Returns the configuration from the files, as they are or were at most [`READ_EVERY`] ago. If the files cannot be used any more, the
    /// last usable configuration stays.
    pub(super) async fn config(&self) -> Arc<ClientConfig> {
        {
            let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
            if now.read.elapsed() < READ_EVERY {
                return Arc::clone(&now.config);
            }
            now.read = Instant::now();
        }
        let files = self.files.clone();
        let read = tokio::task::spawn_blocking(move || files.read()).await;
        self.take(read.expect("reading certificates does not panic"))
    }

    /// Adopts the files' content if it differs: an unchanged configuration resumes its sessions.
    fn take(&self, read: Result<Material, CertificateError>) -> Arc<ClientConfig> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let made = read.and_then(|material| {
            let changed = material != now.material;
            Ok(if changed { Some((material.config()?, material)) } else { None })
        });
        match made {
            Ok(Some((config, material))) => {
                (now.config, now.material) = (config, material);
                tracing::info!("the certificates for etcd were replaced");
            }
            Ok(None) => {}
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    error,
                    "the certificates for etcd cannot be read again; those of before stay in use"
                );
            }
        }
        Arc::clone(&now.config)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Files {
    fn read(&self) -> Result<Material, CertificateError> {
        let authorities = match &self.ca {
            Some(path) => certificates(path)?,
            None => of_system()?,
        };
        let own = match &self.own {
            Some((certificate, key)) => Some((certificates(certificate)?, private_key(key)?)),
            None => None,
        };
        Ok(Material { authorities, own })
    }
}

impl Material {
    fn config(&self) -> Result<Arc<ClientConfig>, CertificateError> {
        let refused = |source| CertificateError::Refused { source };
        let mut roots = RootCertStore::empty();
        // Some of a system's authorities are of a kind that rustls does not accept.
        let (usable, _) = roots.add_parsable_certificates(self.authorities.iter().cloned());
        if usable == 0 {
            return Err(CertificateError::NoAuthorities { why: " that rustls takes".to_owned() });
        }
        // A named provider, not the process's default: whoever sets the default must not change what is trusted here.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(refused)?
            .with_root_certificates(roots);
        let config = match &self.own {
            Some((chain, key)) => {
                builder.with_client_auth_cert(chain.clone(), key.clone_key()).map_err(refused)?
            }
            None => builder.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }
}

fn of_system() -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let why = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        return Err(CertificateError::NoAuthorities { why });
    }
    Ok(found.certs)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let content = |what| CertificateError::Content { path: path.to_owned(), what };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| content(error.to_string()))?;
    if found.is_empty() {
        return Err(content("there is no certificate in it; it must be PEM".to_owned()));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CertificateError> {
    PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|error| CertificateError::Content { path: path.to_owned(), what: error.to_string() })
}

fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    let failed = |source| CertificateError::Read { path: path.to_owned(), source };
    let mut bytes = vec![];
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(failed)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > FILE_BYTES_MAX {
        let what = format!("it has more than {FILE_BYTES_MAX} bytes; is it the right file?");
        return Err(CertificateError::Content { path: path.to_owned(), what });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tidemark_transport::certs;

    fn settings(folder: &Path, node: &str) -> EtcdSettings {
        let file = |name: String| Some(folder.join(name));
        EtcdSettings {
            ca: file("ca.pem".to_owned()),
            cert: file(format!("{node}.pem")),
            key: file(format!("{node}.key")),
            ..EtcdSettings::default()
        }
    }

    #[test]
    fn files_that_are_no_certificates_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        certs::init(folder, "blue").expect("an authority");
        certs::issue(folder, "a", &[]).expect("a certificate");
        certs::issue(folder, "b", &[]).expect("a certificate");
        Tls::open(&settings(folder, "a")).expect("it can be used");
        let error = |settings: &EtcdSettings| {
            let error = Tls::open(settings).expect_err("it cannot be used");
            format!("{error:?} {error}")
        };
        assert!(error(&settings(folder, "none")).contains("none.pem"));
        let mut mixed = settings(folder, "a");
        mixed.key = settings(folder, "b").key;
        assert!(error(&mixed).contains("InconsistentKeys"), "{}", error(&mixed));
        mixed.key.clone_from(&mixed.cert);
        assert!(error(&mixed).contains("a.pem"));
        fs::write(folder.join("ca.pem"), "nothing").expect("written");
        assert!(error(&settings(folder, "a")).contains("there is no certificate in it"));
        fs::write(folder.join("ca.pem"), vec![b'x'; (1 << 20) + 1]).expect("written");
        assert!(error(&settings(folder, "a")).contains("1048576 bytes"));
    }

    #[test]
    fn certificates_that_were_replaced_count_and_bad_ones_leave_those_of_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        certs::init(folder, "blue").expect("an authority");
        certs::issue(folder, "a", &[]).expect("a certificate");
        certs::issue(folder, "b", &[]).expect("a certificate");
        let tls = Tls::open(&settings(folder, "a")).expect("it can be used");
        let first = tls.take(tls.files.read());
        assert!(Arc::ptr_eq(&first, &tls.take(tls.files.read())), "nothing has changed");
        for end in ["pem", "key"] {
            fs::rename(folder.join(format!("b.{end}")), folder.join(format!("a.{end}"))).expect("renamed");
        }
        let second = tls.take(tls.files.read());
        assert!(!Arc::ptr_eq(&first, &second), "they were replaced");
        fs::write(folder.join("a.key"), "nothing").expect("written");
        assert!(Arc::ptr_eq(&second, &tls.take(tls.files.read())), "those of before are in use");
    }
}
