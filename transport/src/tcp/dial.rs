//! Opening a connection to another node: TCP, TLS, greeting.
//!
//! Owns: the steps and their time limit, and the check that the node that answers is the one that was called. Does not
//! own: when to try again (`mod`).

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustls::{AlertDescription, CertificateError, Error as TlsError};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;

use super::greeting::{self, Answer, Hello, Purpose, Welcome};
use super::stream::{self, Stream};
use super::{Node, Security};
use crate::error::{LinkError, Mismatch};
use crate::link::Address;
use crate::names::{proves, server_name};

/// Time limit from the first packet to the end of the greeting. Two lost packets fit.
const DIAL: Duration = Duration::from_secs(4);

/// Opens a connection and greets. Cancel safe: whatever is open is closed.
pub(crate) async fn dial(
    node: &Node,
    to: &Address,
    purpose: Purpose,
) -> Result<(Stream, Welcome), LinkError> {
    tokio::time::timeout(DIAL, steps(node, to, purpose))
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        .map_err(|failure| match failure {
            Failure::Connection(source) => {
                LinkError::Unreachable { node: to.node.clone(), address: to.address.clone(), source }
            }
            Failure::Mismatch(why) => {
                LinkError::Handshake { node: to.node.clone(), address: to.address.clone(), why }
            }
        })
}

enum Failure {
    Connection(io::Error),
    Mismatch(Mismatch),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        mismatch_of(&error).map_or(Self::Connection(error), Self::Mismatch)
    }
}

impl From<Mismatch> for Failure {
    fn from(why: Mismatch) -> Self {
        Self::Mismatch(why)
    }
}

async fn steps(node: &Node, to: &Address, purpose: Purpose) -> Result<(Stream, Welcome), Failure> {
    let mut addresses: Vec<SocketAddr> = lookup_host(&to.address).await?.collect();
    if matches!(node.settings.security, Security::Insecure { off_loopback: false }) {
        let found = addresses.first().copied();
        addresses.retain(|address| address.ip().is_loopback());
        if let (Some(found), true) = (found, addresses.is_empty()) {
            return Err(Mismatch::Insecure { address: found.to_string() }.into());
        }
    }
    let socket = TcpStream::connect(&addresses[..]).await?;
    stream::configure(&socket)?;
    let mut stream = match &node.settings.security {
        Security::Insecure { .. } => Stream::Plain(socket),
        Security::Certificates(certs) => {
            let connector = TlsConnector::from(std::sync::Arc::clone(&certs.client));
            let stream = connector.connect(server_name(&to.node)?, socket).await.map_err(|error| {
                other_node(&error, &to.node).map_or_else(|| Failure::from(error), Failure::Mismatch)
            })?;
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let missing = || Mismatch::Certificate("there is none".into());
            proves(certificate.ok_or_else(missing)?, &node.identity.cluster, &to.node)?;
            Stream::Tls(Box::new(stream.into()))
        }
    };
    let hello = Hello {
        purpose,
        identity: node.identity.clone(),
        epoch: node.service.epoch(),
        wanted: to.node.clone(),
    };
    greeting::say(&mut stream, &hello.encode()).await?;
    match Answer::decode(&greeting::hear(&mut stream).await??)? {
        Answer::Sorry(why) => Err(why.into()),
        Answer::Welcome(welcome) if welcome.identity.cluster != node.identity.cluster => {
            let (ours, theirs) = (node.identity.cluster.clone(), welcome.identity.cluster);
            Err(Mismatch::OtherCluster { ours, theirs }.into())
        }
        Answer::Welcome(welcome) if welcome.identity.node != to.node => {
            Err(Mismatch::OtherNode { wanted: to.node.clone(), found: welcome.identity.node }.into())
        }
        // The other owner's setting alone does not make this node's bytes readable on the way.
        Answer::Welcome(Welcome { encrypts: false, .. })
            if purpose == Purpose::Bulk && matches!(stream, Stream::Tls(_)) =>
        {
            Err(Mismatch::NotALink("it does not encrypt bytes that this node encrypts".into()).into())
        }
        Answer::Welcome(welcome) => Ok((stream, welcome)),
    }
}

/// Returns the mismatch that a TLS error stands for, if it is a TLS error. In TLS 1.3 a server's objection to this
/// node's certificate arrives with the first bytes that are read.
pub(crate) fn mismatch_of(error: &io::Error) -> Option<Mismatch> {
    let tls = error.get_ref()?.downcast_ref::<TlsError>()?;
    Some(match tls {
        TlsError::InvalidCertificate(what) => Mismatch::Certificate(what.to_string()),
        TlsError::NoCertificatesPresented => Mismatch::Certificate("there is none".into()),
        TlsError::AlertReceived(alert) => match alert {
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateRequired
            | AlertDescription::DecryptError
            | AlertDescription::AccessDenied
            | AlertDescription::UnknownCA => {
                Mismatch::Certificate(format!("the other end refused ours: {alert:?}"))
            }
            other => Mismatch::NotALink(format!("TLS alert {other:?}")),
        },
        other => Mismatch::NotALink(other.to_string()),
    })
}

/// Returns the mismatch if the certificate is valid but names another node.
fn other_node(error: &io::Error, wanted: &str) -> Option<Mismatch> {
    let tls = error.get_ref()?.downcast_ref::<TlsError>()?;
    let TlsError::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }) = tls else {
        return None;
    };
    let found = presented.iter().find_map(|name| {
        let name = name.strip_prefix("DnsName(\"").and_then(|name| name.strip_suffix("\")")).unwrap_or(name);
        name.strip_suffix(".node.tidemark")
    })?;
    Some(Mismatch::OtherNode { wanted: wanted.to_owned(), found: found.to_owned() })
}
