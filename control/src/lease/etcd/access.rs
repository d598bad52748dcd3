//! Access to an etcd: its address, the certificate it must have, and this node's user there.
//!
//! Owns: making the access from the settings. Does not own: the grammar of a place (`place`), certificates (`tls`), the user (`login`).

use super::error::PasswordError;
use super::login::Login;
use super::place::EtcdPlace;
use super::tls::{CertificateError, Tls};
use std::sync::Arc;
use tidemark_engine::settings::EtcdSettings;

/// An etcd and how to log in. Clones share the token that etcd issued.
#[derive(Debug, Clone)]
pub struct EtcdAccess {
    pub(super) place: EtcdPlace,
    pub(super) login: Option<Arc<Login>>,
    pub(super) tls: Option<Arc<Tls>>,
}

/// Why an etcd cannot be asked with these settings.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error(transparent)]
    Password(#[from] PasswordError),
    #[error("the certificates for etcd cannot be used")]
    Certificates(#[from] CertificateError),
}

impl EtcdAccess {
    /// Reads the files that `settings` name. Nothing is sent.
    ///
    /// # Errors
    /// A file is missing, is not what it should be, or other users may read the password.
    pub fn open(place: EtcdPlace, settings: &EtcdSettings) -> Result<Self, AccessError> {
        let login = match (&settings.user, &settings.password_file) {
            (Some(user), Some(file)) => Some(Arc::new(Login::open(user, file)?)),
            _ => None,
        };
        let tls = if place.tls { Some(Arc::new(Tls::open(settings)?)) } else { None };
        if login.is_some() && tls.is_none() {
            tracing::warn!(%place, "the password travels to etcd readable; write https:// where etcd has a certificate");
        }
        Ok(Self { place, login, tls })
    }
}
