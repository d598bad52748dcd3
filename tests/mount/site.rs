//! A mount for one test, removed however the test ends.
//!
//! Owns: [`Site`], and the choice of tests that are left out. Does not own: any check.

use std::env;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tidemark_fuse::{Host, Mode, ModeChoice, MountError, MountSettings, Mounted, mount};
use tidemark_namespace::{ColdFile, FileState, FileView, FsError, Namespace, NamespaceSettings, NodeId};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

/// Variable that makes tests of both modes' promises run in FALLBACK. The guest suite sets it.
const FALLBACK_ENV: &str = "TIDEMARK_MOUNT_FALLBACK";
const TIER1_BYTES: u64 = 512 << 20;
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The daemon's side, with a control file `status` that counts how often it was rendered.
#[derive(Default)]
pub(crate) struct Daemon {
    renders: AtomicUsize,
}

impl Host for Daemon {
    fn fetch(&self, _: ColdFile) -> Result<(), FsError> {
        Err(FsError::Io)
    }
    fn verify(&self, _: NodeId) -> Result<(), FsError> {
        Ok(())
    }

    fn control_files(&self) -> Vec<String> {
        vec!["status".into(), "latest".into()]
    }
    fn control_read(&self, name: &str) -> Option<Vec<u8>> {
        match name {
            "status" => {
                Some(format!("render {}\n", self.renders.fetch_add(1, Ordering::SeqCst)).into_bytes())
            }
            "latest" => Some(vec![b'x'; 300_000]),
            _ => None,
        }
    }
}

/// A mount. Fields are dropped in order: the mount first, then its directory.
pub(crate) struct Site {
    pub(crate) mounted: Mounted,
    pub(crate) namespace: Arc<Namespace>,
    directory: tempfile::TempDir,
}

impl Site {
    /// Makes a mount with passthrough, for promises of that mode alone. If this machine cannot have one, or [`FALLBACK_ENV`]
    /// is set, prints why and returns `None`.
    pub(crate) fn passthrough() -> Option<Self> {
        if env::var_os(FALLBACK_ENV).is_some() {
            println!("left out: this is promised with passthrough only");
            return None;
        }
        Self::new(ModeChoice::Passthrough)
    }

    /// Makes a mount in the better mode of this kernel: with passthrough, unless [`FALLBACK_ENV`] is set.
    pub(crate) fn usual() -> Option<Self> {
        if env::var_os(FALLBACK_ENV).is_some() { Self::fallback() } else { Self::passthrough() }
    }

    /// Makes a mount without passthrough.
    pub(crate) fn fallback() -> Option<Self> {
        Self::new(ModeChoice::Fallback)
    }

    /// Makes a mount of each kind that this machine can have, for agreements of kernel and daemon about names and inodes.
    pub(crate) fn both() -> impl Iterator<Item = Self> {
        [Self::usual, Self::fallback].into_iter().filter_map(|site| site())
    }

    /// Waits for the number of nodes, because the kernel forgets an inode some time after its last use.
    pub(crate) fn wait_for_nodes(&self, expected: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.namespace.room().statfs().nodes != expected {
            let nodes = self.namespace.room().statfs().nodes;
            assert!(Instant::now() < deadline, "{nodes} nodes, expected {expected}: one is not forgotten");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn new(mode: ModeChoice) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            println!("left out: the mount suite needs root and /dev/fuse");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let tier1 = Tier1::open(Tier1Settings {
            size_bytes: TIER1_BYTES,
            ballast: false,
            medium: MediumChoice::Auto,
        })
        .unwrap();
        let settings = NamespaceSettings::new(Incarnation(7));
        let namespace = Namespace::new(settings, Arc::clone(&tier1)).unwrap();
        let settings = MountSettings { mode, ..MountSettings::new(directory.path().join("ckpt")) };
        match mount(&settings, &tier1, Arc::clone(&namespace), Arc::new(Daemon::default())) {
            Ok(mounted) => {
                let expected = if mode == ModeChoice::Fallback { Mode::Fallback } else { Mode::Passthrough };
                assert_eq!(mounted.mode(), expected, "{}", mounted.reason());
                Some(Self { mounted, namespace, directory })
            }
            Err(MountError::NoPassthrough { reason }) if kernel() < (6, 9) => {
                println!("left out: {reason}");
                None
            }
            Err(error) => panic!("{error}: {error:?}"),
        }
    }

    /// Returns a path in the mount.
    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.mounted.path().join(name)
    }

    /// Returns a path outside the mount, for a test's other files.
    pub(crate) fn outside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn view(&self, name: impl AsRef<Path>) -> FileView {
        let name = name.as_ref().as_os_str().as_bytes();
        let node = self.namespace.nodes().node_at(name).expect("the file has a name");
        self.namespace.nodes().view(node).expect("the node is a file")
    }

    /// Waits for a file's state after its close, because RELEASE comes some time after close(2) has returned.
    pub(crate) fn state_after_close(&self, name: impl AsRef<Path>) -> FileState {
        let name = name.as_ref();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.view(name).state;
            if !matches!(state, FileState::Open { .. }) {
                return state;
            }
            assert!(Instant::now() < deadline, "{} is still open", name.display());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Seals a closed file as the node loop would.
    pub(crate) fn seal(&self, name: impl AsRef<Path>) {
        let name = name.as_ref();
        assert_eq!(self.state_after_close(name), FileState::Closed);
        let ticket = self.namespace.seals().begin_seal(self.view(name).node).unwrap();
        let bytes = ticket.backing.map().unwrap();
        let chunk = usize::try_from(tidemark_protocol::layout::CHUNK_BYTES).unwrap();
        let crc = tidemark_protocol::checksum::Crc64;
        let sum = |part: &[u8]| crc(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, part));
        let chunks: Arc<[_]> = bytes.chunks(chunk).map(sum).collect();
        self.namespace.seals().finish_seal(&ticket, sum(&bytes), chunks).unwrap();
    }
}

/// Returns the kernel's major and minor version.
pub(crate) fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Returns bytes that differ at every page and every repetition.
pub(crate) fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| u8::try_from((i ^ (i >> 8) ^ (i >> 16)) & 0xff).unwrap().wrapping_add(seed)).collect()
}
