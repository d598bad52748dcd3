//! `ckptctl certs`: the certificates that nodes prove themselves to each other with.
//!
//! Owns: the words. Does not own: the certificates (transport). Asks no daemon.

use crate::context::{Context, Failure};
use std::io::Write;
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

impl Args {
    pub(crate) fn run(self, _: &Context) -> Result<ExitCode, Failure> {
        let made = match self.what {
            What::Init { directory, cluster } => certs::init(&directory, &cluster)
                .map(|()| format!("{} is the authority of {cluster}", directory.join("ca.pem").display())),
            What::Node { directory, node, sans } => {
                certs::issue(&directory, &node, &sans).map(|(certificate, key)| {
                    format!("{} and {} are {node}'s", certificate.display(), key.display())
                })
            }
        };
        let said = made.map_err(|source| Failure::Certificates { source })?;
        writeln!(anstream::stdout(), "{said}").map_err(|source| Failure::Output { source })?;
        Ok(ExitCode::Done)
    }
}
