//! The state directory: made 0700, one daemon each.
//!
//! Owns: the directory, its lock. Does not own: the socket (control), the last known status (`up`). Nothing in the
//! directory is durable; it may be deleted while no daemon runs.

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a daemon may take to leave that was killed: its memory goes first, its locks after.
const LEAVING_PATIENCE: Duration = Duration::from_secs(3);
const LEAVING_EVERY: Duration = Duration::from_millis(20);

/// Proof that this process is the only daemon with this state directory. Released by death.
#[derive(Debug, Clone)]
pub(crate) struct StateDir {
    path: PathBuf,
    lock: Arc<std::fs::File>,
}

impl StateDir {
    /// Makes the directory if missing and takes its lock, unless it was `inherited` with the lock taken. Errors: a live
    /// daemon holds it (its pid is named) and does not leave within [`LEAVING_PATIENCE`].
    pub(crate) fn take(path: &Path, inherited: Option<OwnedFd>) -> anyhow::Result<Self> {
        if let Some(lock) = inherited {
            return Ok(Self { path: path.to_owned(), lock: Arc::new(lock.into()) });
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("the state directory {} cannot be made", path.display()))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("the state directory {} cannot be closed to others", path.display()))?;
        let lock_path = path.join("lock");
        let descriptor = rustix::fs::open(
            &lock_path,
            OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW,
            Mode::RUSR | Mode::WUSR,
        )
        .with_context(|| format!("the lock {} cannot be opened", lock_path.display()))?;
        let mut lock = std::fs::File::from(descriptor);
        let until = Instant::now() + LEAVING_PATIENCE;
        while let Err(errno) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if !matches!(errno, Errno::WOULDBLOCK | Errno::INTR) {
                return Err(errno)
                    .with_context(|| format!("the lock {} cannot be taken", lock_path.display()));
            }
            if Instant::now() < until {
                std::thread::sleep(LEAVING_EVERY);
                continue;
            }
            let mut holder = String::new();
            let _ = (&lock).take(32).read_to_string(&mut holder);
            bail!(
                "another ckptd (pid {}) uses the state directory {}; stop it, or give this one --state-dir",
                holder.trim(),
                path.display()
            );
        }
        lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| write!(lock, "{}", std::process::id()))?;
        Ok(Self { path: path.to_owned(), lock: Arc::new(lock) })
    }

    /// A duplicate of the lock: it is held until the last one is closed.
    pub(crate) fn lock(&self) -> std::io::Result<OwnedFd> {
        Ok(self.lock.try_clone()?.into())
    }

    /// The socket that `ckptctl` talks to.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join("ckptd.sock")
    }

    /// The coordinator's lock file when no other lease is asked for.
    pub(crate) fn lease(&self) -> PathBuf {
        self.path.join("lease")
    }

    /// Commands are answered: what the keeper said of daemons before this one is over.
    pub(crate) fn clear_keeper_status(&self) {
        // Nearly always there is none.
        let _ = std::fs::remove_file(self.path.join(tidemark_control::api::KEEPER_FILE_NAME));
    }

    /// Replaces the last known status, for `ckptctl status` when no daemon answers.
    pub(crate) fn write_status(&self, json: &[u8]) -> std::io::Result<()> {
        let fresh = self.path.join("status.json.new");
        std::fs::write(&fresh, json)?;
        std::fs::rename(fresh, self.path.join("status.json"))
    }
}
