//! `ckptctl certs`: the certificates that nodes prove themselves to each other with.
//!
//! Owns: the words. Does not own: the certificates (transport). Asks no daemon.

use crate::context::{Context, Failure};
use std::path::PathBuf;
use tidemark_protocol::report::ExitCode;
use tidemark_transport::certs;

/// Make a cluster's authority, and certificates for its nodes
///
/// Keep ca.key where nodes are set up. A node needs ca.pem, NODE.pem and NODE.key, in the directory that its --certs names.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make ca.pem and ca.key in a new authority's directory
    Init {
        directory: PathBuf,
        /// The cluster; nodes of others are refused
        #[arg(long, default_value = "tidemark", value_name = "NAME")]
        cluster: String,
    },
    /// Make NODE.pem and NODE.key beside the authority
    Node {
        directory: PathBuf,
        /// The node, as `ckptd up --name` calls it
        node: String,
        /// Addresses or host names that it is valid for besides; may be given several times
        #[arg(long = "san", value_name = "ADDR")]
        sans: Vec<String>,
    },
}

/// Files that were made.
#[derive(Debug, serde::Serialize)]
struct Made {
    /// `authority` or `node`.
    kind: &'static str,
    /// The cluster's name, or the node's.
    name: String,
    certificate: PathBuf,
    key: PathBuf,
}

impl Args {
    pub(crate) fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let made = match self.what {
            What::Init { directory, cluster } => certs::init(&directory, &cluster).map(|()| Made {
                kind: "authority",
                name: cluster,
                certificate: directory.join("ca.pem"),
                key: directory.join("ca.key"),
            }),
            What::Node { directory, node, sans } => certs::issue(&directory, &node, &sans)
                .map(|(certificate, key)| Made { kind: "node", name: node, certificate, key }),
        };
        let made = made.map_err(|source| Failure::Certificates { source })?;
        context.print(&made, |made, out| {
            let (certificate, key) = (made.certificate.display(), made.key.display());
            match made.kind {
                "authority" => writeln!(out, "{certificate} is the authority of {}", made.name),
                _ => writeln!(out, "{certificate} and {key} are {}'s", made.name),
            }
        })?;
        Ok(ExitCode::Done)
    }
}
