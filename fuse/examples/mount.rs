//! Mounts Tier-1 at a path without a daemon: nothing is sealed, uploaded or restored.
//!
//! `cargo run -p tidemark-fuse --example mount -- MOUNTPOINT [SIZE_MIB] [auto|passthrough|fallback]`
//! For trying the mount by hand. Ends when it is unmounted (`umount MOUNTPOINT`) and prints the counts of its requests.

use std::process::ExitCode;
use std::sync::Arc;
use tidemark_fuse::{Host, ModeChoice, MountSettings, mount};
use tidemark_namespace::{ColdFile, FsError, Namespace, NamespaceSettings, NodeId};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

struct NothingCold;

impl Host for NothingCold {
    fn fetch(&self, _: ColdFile) -> Result<(), FsError> {
        Err(FsError::Io)
    }
    fn verify(&self, _: NodeId) -> Result<(), FsError> {
        Ok(())
    }

    fn control_files(&self) -> Vec<String> {
        vec!["status".to_owned()]
    }
    fn control_read(&self, name: &str) -> Option<Vec<u8>> {
        (name == "status").then(|| b"an example without a daemon\n".to_vec())
    }
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "an example talks to its terminal")]
fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(mountpoint) = arguments.next() else {
        eprintln!("usage: mount MOUNTPOINT [SIZE_MIB] [auto|passthrough|fallback]");
        return ExitCode::from(2);
    };
    let size_mib: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1024);
    let mode = match arguments.next().as_deref() {
        Some("passthrough") => ModeChoice::Passthrough,
        Some("fallback") => ModeChoice::Fallback,
        _ => ModeChoice::Auto,
    };
    match run(&mountpoint, size_mib << 20, mode) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "an example talks to its terminal")]
fn run(mountpoint: &str, size_bytes: u64, mode: ModeChoice) -> Result<String, Box<dyn std::error::Error>> {
    let tier1 = Tier1::open(Tier1Settings { size_bytes, ballast: true, medium: MediumChoice::Auto })?;
    let namespace = Namespace::new(NamespaceSettings::new(Incarnation(1)), Arc::clone(&tier1))?;
    let settings = MountSettings { mode, ..MountSettings::new(mountpoint) };
    let mounted = mount(&settings, &tier1, namespace, Arc::new(NothingCold))?;
    println!("ready: mount={} mode={} ({})", mounted.path().display(), mounted.mode(), mounted.reason());
    mounted.wait()?;
    Ok(format!("{:?}", mounted.counters()))
}
