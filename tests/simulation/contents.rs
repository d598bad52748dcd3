//! Programs that write and read whole files.
//!
//! Owns: the order of steps in which the kernel and the mount let a program have the bytes. Does not own: names (`calls`), where the bytes
//! are (the product).

use super::calls::{Calls, split};
use std::io::ErrorKind;
use std::time::Duration;
use tidemark_engine::node::{NotVerified, heal_at_open, verify_at_open};
use tidemark_namespace::{FsError, Kind, OpenOutcome};
use tokio::time::Instant;

const O_RDONLY: i32 = 0;
const O_WRONLY: i32 = 1;
const O_EXCL: i32 = 0o200;

/// How long a write waits for memory that gives way, and how often it looks, as the mount's does.
const ROOM_COMES: Duration = Duration::from_secs(30);
const ROOM_AGAIN: Duration = Duration::from_millis(100);

/// How often bytes that were fetched may be gone again before the open.
const OPENS_MAX: usize = 8;

impl Calls<'_> {
    /// Makes a file, writes its bytes and closes it. If `dies`, the program is killed after half of them, and the kernel closes the file.
    pub(super) async fn write_file(&self, path: &str, bytes: &[u8], dies: bool) -> Result<(), FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        let _locked = self.inodes.lock(&[parent]).await;
        self.is_free(parent, name).await?;
        let name = name.as_bytes().to_vec();
        let wanted = tidemark_engine::cluster::Wanted::Change { parent, name: name.clone(), sure: true };
        let leave = self.leave(wanted).await?;
        let (namespace, caller) = (&self.running.namespace, self.caller(0));
        let (attr, open) = namespace.create(&caller, parent, &name, 0o644, O_WRONLY | O_EXCL)?;
        drop(leave);
        let written = if dies { &bytes[..bytes.len() / 2] } else { bytes };
        let (mut at, give_up) = (0, Instant::now() + ROOM_COMES);
        let all = loop {
            match open.backing.write_at(&written[at..], at as u64) {
                Ok(more) => at += more,
                Err(error) if error.kind() == ErrorKind::StorageFull && Instant::now() < give_up => {
                    tokio::time::sleep(ROOM_AGAIN).await;
                }
                Err(error) if error.kind() == ErrorKind::StorageFull => break Err(FsError::NoSpace),
                Err(error) => panic!("memory is written: {error}"),
            }
            if at == written.len() {
                break Ok(());
            }
        };
        namespace.handles().flush(open.fh, &caller, dies)?;
        namespace.handles().release(open.fh)?;
        namespace.forget(attr.node, 1);
        all
    }

    /// Reads a whole file.
    pub(super) async fn read_file(&self, path: &str) -> Result<Vec<u8>, FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        let attr = self.look_up(parent, name).await?;
        if attr.kind != Kind::File {
            return Err(FsError::IsDirectory);
        }
        let (namespace, caller) = (&self.running.namespace, self.caller(0));
        let serving = self.running.serving.as_ref().expect("it has bytes");
        for _ in 0..OPENS_MAX {
            match namespace.open(&caller, attr.node, O_RDONLY)? {
                OpenOutcome::Ready(open) => {
                    let size_bytes = open.backing.stat().expect("memory can be asked").size_bytes;
                    let mut bytes = vec![0; usize::try_from(size_bytes).expect("it fits into memory")];
                    open.backing.read_exact_at(&mut bytes, 0).expect("memory can be read");
                    namespace.handles().release(open.fh)?;
                    return Ok(bytes);
                }
                OpenOutcome::Cold(cold) => {
                    let restorer = &serving.node.shared().restorer;
                    restorer.restore(path.to_owned(), cold).await.map_err(|error| error.errno())?;
                }
                OpenOutcome::Unverified => match verify_at_open(namespace, attr.node, 1) {
                    Ok(()) => {}
                    Err(NotVerified::Bad(bad)) => heal_at_open(serving.node.shared(), *bad).await?,
                    Err(NotVerified::Unreadable(error)) => return Err(error),
                },
            }
        }
        Err(FsError::Io)
    }
}
