//! Tier-3 in a directory: `file:///path`, on Lustre or any POSIX mount.
//!
//! Owns: [`PosixStore`], its bound on blocking calls, and its errors. Does not own: the system calls (`files`, `walk`), the
//! presence of the directory and links below it (`root`), the names (`names`), sharing an fsync (`sync`), comparing written bytes
//! (`compare`), parts past the page cache (`direct`, `ring`, `buffers`).
//!
//! A file appears under its key only when it is whole and durable. The steps are: temporary name, fsync of the file, link(2) as
//! create-if-absent (else renameat2 with RENAME_NOREPLACE), fsync of every directory up to the root.

mod buffers;
mod compare;
mod direct;
mod files;
mod names;
mod ring;
mod root;
mod sync;
mod walk;

use super::{
    Created, Damage, Listing, MAX_LISTED, ObjectHead, Operation, PartSource, Store, StoreError, UploadLimits,
    Uploaded, check_key, part_ranges, read_part,
};
use async_trait::async_trait;
use bytes::Bytes;
use direct::Direct;
use files::Staged;
use futures::{TryStreamExt, stream};
use names::{STAGING, path_of};
use root::Root;
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use sync::DirectorySyncs;
use tokio::sync::Semaphore;

/// Maximum number of blocking calls at once. There are enough to fill a parallel file system and to let a journal group their
/// fsyncs. The limit leaves the runtime's blocking pool (512 threads) to others when a mount hangs.
const PARALLEL_CALLS: usize = 64;

/// Objects as files below a directory.
#[derive(Debug)]
pub struct PosixStore {
    root: Arc<Root>,
    url: String,
    calls: Arc<Semaphore>,
    syncs: Arc<DirectorySyncs>,
    direct: Arc<Direct>,
}

impl PosixStore {
    /// Makes the directory if it is missing, and removes what crashes left in its staging directory.
    pub async fn open(root: &Path) -> Result<Self, StoreError> {
        let url = format!("file://{}", root.display());
        let calls = Arc::new(Semaphore::new(PARALLEL_CALLS));
        let direct = Arc::<Direct>::default();
        let root = Arc::new(Root::new(root));
        let store = Self { root, url, calls, syncs: Arc::default(), direct: Arc::clone(&direct) };
        store.call(Operation::Open, "", files::prepare).await?;
        store.call(Operation::Open, "", move |root| files::try_direct(root, &direct)).await?;
        Ok(store)
    }

    /// Runs a blocking call on the pool, within the bound. The call runs to its end even if the caller gives up.
    async fn call<T: Send + 'static>(
        &self,
        operation: Operation,
        key: &str,
        work: impl FnOnce(&Root) -> io::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.io(work).await.map_err(|error| self.failed(operation, key, error))
    }

    async fn io<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Root) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let permit = Arc::clone(&self.calls).acquire_owned().await.map_err(io::Error::other)?;
        let root = Arc::clone(&self.root);
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&root)
        })
        .await
        .map_err(io::Error::other)?
    }

    /// Writes all parts of a source under a temporary name.
    async fn stage(
        &self,
        key: &str,
        source: &Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Arc<Staged>, StoreError> {
        let (size_bytes, readers) = (source.size_bytes(), source.readers());
        let direct = Arc::clone(&self.direct);
        let staged = self
            .call(Operation::Upload, key, move |root| Staged::new_direct(root, size_bytes, readers, &direct))
            .await
            .map(Arc::new)?;
        stream::iter(part_ranges(size_bytes, limits.part_bytes).map(Ok))
            .try_for_each_concurrent(limits.parts_in_flight.max(1), |range| {
                let staged = Arc::clone(&staged);
                async move {
                    let bytes = read_part(key, source, range.clone()).await?;
                    self.call(Operation::Upload, key, move |_| staged.write_at(&bytes, range.start)).await
                }
            })
            .await?;
        Ok(staged)
    }

    /// Returns the result of an upload. `other`: the key holds other bytes, of this size.
    fn uploaded(&self, key: &str, size_bytes: u64, other: Option<u64>) -> Result<Uploaded, StoreError> {
        match other {
            None => Ok(Uploaded { etag: None, size_bytes }),
            Some(there_bytes) => Err(StoreError::Differs {
                key: key.to_owned(),
                store: self.url.clone(),
                there_bytes,
                ours_bytes: size_bytes,
            }),
        }
    }

    fn check(&self, operation: Operation, key: &str) -> Result<(), StoreError> {
        check_key(operation, key, &self.url)?;
        if key.split('/').next() == Some(STAGING) {
            return Err(StoreError::Key {
                operation,
                key: key.to_owned(),
                store: self.url.clone(),
                reason: format!("{STAGING} is where this store keeps unfinished files"),
            });
        }
        Ok(())
    }

    fn failed(&self, operation: Operation, key: &str, error: io::Error) -> StoreError {
        let (key, store) = (key.to_owned(), self.url.clone());
        let action = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                return StoreError::NoSpace { operation, key, store, source: error };
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "let the daemon's user read and write this directory, and mount it read-write"
            }
            io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "an object and a directory claim one name; move what does not belong to Tidemark away"
            }
            io::ErrorKind::InvalidData => {
                "put the file or directory itself there, or name the place where it lies"
            }
            io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => {
                "use a file system with file names of 255 bytes and link or renameat2, and Linux 5.6 or newer"
            }
            _ => {
                return StoreError::Unavailable {
                    operation,
                    key,
                    store,
                    attempts: 1,
                    source: Box::new(error),
                };
            }
        };
        StoreError::Refused { operation, key, store, reason: error.to_string(), action: action.to_owned() }
    }
}

#[async_trait]
impl Store for PosixStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        self.check(Operation::Create, key)?;
        let (name, syncs) = (key.to_owned(), Arc::clone(&self.syncs));
        let create = move |root: &Root| files::create(root, &name, &body, &syncs);
        let ours = self.call(Operation::Create, key, create).await?;
        Ok(if ours { Created::Created } else { Created::AlreadyExists })
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        self.check(Operation::Get, key)?;
        let path = path_of(self.root.path(), key);
        let read = self
            .io(move |root| {
                let inside = root.enter()?;
                let Some(file) = inside.found(root::open_object(&inside, &path))? else { return Ok(None) };
                let size_bytes = file.metadata()?.len();
                if size_bytes > limit_bytes {
                    return Ok(Some(Err(size_bytes)));
                }
                let len = usize::try_from(size_bytes).map_err(io::Error::other)?;
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, 0)?;
                Ok(Some(Ok(Bytes::from(bytes))))
            })
            .await;
        match read {
            Ok(None) => Ok(None),
            Ok(Some(Ok(bytes))) => Ok(Some(bytes)),
            Ok(Some(Err(size_bytes))) => Err(StoreError::TooLarge {
                key: key.to_owned(),
                store: self.url.clone(),
                size_bytes,
                limit_bytes,
            }),
            Err(error) => Err(self.failed(Operation::Get, key, error)),
        }
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.check(Operation::GetRange, key)?;
        let path = path_of(self.root.path(), key);
        let (wanted, direct) = (range.clone(), Arc::clone(&self.direct));
        let read = self
            .io(move |root| {
                let inside = root.enter()?;
                if let Some(bytes) = direct.read(&inside, &path, &wanted) {
                    return Ok(Some(Ok(bytes)));
                }
                let Some(file) = inside.found(root::open_object(&inside, &path))? else { return Ok(None) };
                let size_bytes = file.metadata()?.len();
                if wanted.start > wanted.end || wanted.end > size_bytes {
                    return Ok(Some(Err(size_bytes)));
                }
                let len = usize::try_from(wanted.end - wanted.start).map_err(io::Error::other)?;
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, wanted.start)?;
                Ok(Some(Ok(Bytes::from(bytes))))
            })
            .await;
        match read {
            Ok(Some(Ok(bytes))) => Ok(bytes),
            Ok(Some(Err(size_bytes))) => Err(StoreError::Range {
                key: key.to_owned(),
                store: self.url.clone(),
                start: range.start,
                end: range.end,
                reason: format!("the object has {size_bytes} bytes"),
            }),
            Ok(None) => Err(StoreError::NotFound {
                operation: Operation::GetRange,
                key: key.to_owned(),
                store: self.url.clone(),
            }),
            Err(error) => Err(self.failed(Operation::GetRange, key, error)),
        }
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        self.check(Operation::Head, key)?;
        let path = path_of(self.root.path(), key);
        let there = self.call(Operation::Head, key, move |root| {
            let inside = root.enter()?;
            let there = inside.found(inside.open(&path, OFlags::PATH))?;
            there.map(|there| File::from(there).metadata()).transpose()
        });
        // A key that is only the beginning of others is absent in an object store, too.
        let object = there.await?.filter(std::fs::Metadata::is_file);
        Ok(object.map(|meta| ObjectHead { key: key.to_owned(), size_bytes: meta.len(), etag: None }))
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        // The prefix may end within a part, so only the parts before can be checked as a key.
        if let Some((folder, _)) = prefix.rsplit_once('/') {
            check_key(Operation::List, folder, &self.url)?;
        }
        let text = prefix.to_owned();
        let walked = self
            .call(Operation::List, prefix, move |root| walk::walk(root, &text, delimiter, MAX_LISTED))
            .await?;
        let Some((found, prefixes)) = walked else {
            return Err(StoreError::TooMany {
                prefix: prefix.to_owned(),
                store: self.url.clone(),
                limit: MAX_LISTED,
            });
        };
        let head = |f: walk::Found| ObjectHead { key: f.key, size_bytes: f.size_bytes, etag: None };
        Ok(Listing { keys: found.into_iter().map(head).collect(), prefixes })
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.check(Operation::Upload, key)?;
        let (size_bytes, readers) = (source.size_bytes(), source.readers());
        let (target, syncs) = (path_of(self.root.path(), key), Arc::clone(&self.syncs));
        if size_bytes <= limits.part_bytes {
            // A single piece: one call to the pool and back, not three.
            let bytes = read_part(key, &source, 0..size_bytes).await?;
            let direct = Arc::clone(&self.direct);
            let upload = move |root: &Root| files::upload(root, &target, (&bytes, readers), &syncs, &direct);
            let other = self.call(Operation::Upload, key, upload).await?;
            return self.uploaded(key, size_bytes, other);
        }
        let staged = self.stage(key, &source, limits).await?;
        let finish = move |root: &Root| staged.finish(root, &target, &syncs);
        let other = self.call(Operation::Upload, key, finish).await?;
        self.uploaded(key, size_bytes, other)
    }

    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.check(Operation::Upload, key)?;
        let (target, syncs) = (path_of(self.root.path(), key), Arc::clone(&self.syncs));
        let staged = self.stage(key, &source, limits).await?;
        let replace = move |root: &Root| staged.replace(root, &target, &syncs);
        self.call(Operation::Upload, key, replace).await?;
        self.uploaded(key, source.size_bytes(), None)
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.check(Operation::Delete, key)?;
        let name = key.to_owned();
        self.call(Operation::Delete, key, move |root| files::delete(root, &name)).await
    }

    /// Tests whether this store would refuse a damaged part: a file system itself refuses none.
    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        if self.call(Operation::Upload, key, files::finds_damage).await? {
            return Ok(Damage::Refused);
        }
        let reason = "this file system gives back other bytes than it has".to_owned();
        Ok(Damage::Accepted { reason })
    }

    fn describe(&self) -> String {
        self.url.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::file::Readers;

    async fn store() -> (tempfile::TempDir, PosixStore) {
        let dir = tempfile::tempdir().expect("tempdir");
        let store = PosixStore::open(&dir.path().join("a/b")).await.expect("open");
        (dir, store)
    }

    /// Counts the files in the staging directory.
    fn unfinished(store: &PosixStore) -> usize {
        let entries = std::fs::read_dir(store.root.path().join(STAGING)).expect("read");
        entries.filter(|entry| !root::is_mark(&entry.as_ref().expect("entry").file_name())).count()
    }

    #[tokio::test]
    async fn leftovers_of_a_crash_are_not_listed_and_old_ones_are_swept() {
        let (_dir, store) = store().await;
        let staging = store.root.path().join(STAGING);
        for (name, age_s) in [("1-old", 10_000), ("1-young", 0)] {
            let file = File::create(staging.join(name)).expect("create");
            let then = std::time::SystemTime::now() - std::time::Duration::from_secs(age_s);
            file.set_modified(then).expect("mtime");
        }
        assert_eq!(store.list("", false).await.expect("list"), Listing::default());
        PosixStore::open(store.root.path()).await.expect("reopen");
        assert!(!staging.join("1-old").exists());
        assert!(staging.join("1-young").exists());
    }

    #[tokio::test]
    async fn nothing_stays_in_staging_after_success_or_failure() {
        let (_dir, store) = store().await;
        store.create("k", Bytes::from("1")).await.expect("create");
        assert_eq!(store.create("k", Bytes::from("2")).await.expect("again"), Created::AlreadyExists);
        let source = Arc::new(Bytes::from("other"));
        let error = store.upload("k", source, &UploadLimits::default()).await.expect_err("differs");
        assert!(matches!(error, StoreError::Differs { there_bytes: 1, ours_bytes: 5, .. }), "{error}");
        assert_eq!(unfinished(&store), 0);
    }

    #[tokio::test]
    async fn what_replaces_an_object_is_open_to_the_readers_of_its_file_and_a_missing_one_comes_back() {
        use std::os::unix::fs::PermissionsExt;
        let (_dir, store) = store().await;
        let (good, limits) = (Bytes::from("good"), UploadLimits::default());
        store.upload("r/k", Arc::new(good.clone()), &limits).await.expect("upload");
        let path = path_of(store.root.path(), "r/k");
        std::fs::write(&path, "bad, and longer").expect("damage");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("chmod");
        store.replace("r/k", Arc::new(good.clone()), &limits).await.expect("replace");
        assert_eq!(store.get("r/k", 99).await.expect("get"), Some(good.clone()));
        assert_eq!(std::fs::metadata(&path).expect("stat").permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(store.root.path().join("r")).expect("remove");
        store.replace("r/k", Arc::new(good.clone()), &limits).await.expect("make again");
        assert_eq!(store.get("r/k", 99).await.expect("get"), Some(good));
        assert_eq!(unfinished(&store), 0);
    }

    /// The pages of a file, as a sealed file gives them: its parts lie on pages.
    struct Pages(memmap2::MmapMut);

    impl AsRef<[u8]> for Pages {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    #[tokio::test]
    async fn an_object_is_whole_whichever_way_its_parts_took() {
        let (_dir, store) = store().await;
        // Two parts go past the page cache; a third begins so and ends within a page.
        let part_bytes = 2 << 20;
        let mut pages = memmap2::MmapMut::map_anon(3 * part_bytes - 4099).expect("memory");
        getrandom::fill(&mut pages).expect("random");
        let body = Bytes::from_owner(Pages(pages));
        let limits = UploadLimits { part_bytes: part_bytes as u64, parts_in_flight: 3 };
        for key in ["k", "k", "whole"] {
            let limits = if key == "whole" { UploadLimits::default() } else { limits };
            store.upload(key, Arc::new(body.clone()), &limits).await.expect("upload");
            assert!(store.get(key, 1 << 30).await.expect("get").is_some_and(|got| got == body), "{key}");
        }
        let size_bytes = body.len() as u64;
        let index = |offset: u64| usize::try_from(offset).expect("it fits");
        for range in [0..size_bytes, 4096..size_bytes, 1..size_bytes, 0..2 << 20, size_bytes - 5..size_bytes]
        {
            let expected = body.slice(index(range.start)..index(range.end));
            let got = store.get_range("k", range.clone()).await.expect("range");
            assert!(got == expected, "{range:?}");
        }
        let beyond = store.get_range("k", 0..size_bytes + 1).await.expect_err("beyond the end");
        assert!(matches!(beyond, StoreError::Range { .. }), "{beyond}");
    }

    #[tokio::test]
    async fn a_directory_where_an_object_is_expected_is_named_as_such() {
        let (_dir, store) = store().await;
        store.create("run/file", Bytes::from("1")).await.expect("create");
        for error in [
            store.get("run", 10).await.expect_err("get"),
            store.create("run", Bytes::new()).await.expect_err("create over a directory"),
            store.create("run/file/below", Bytes::new()).await.expect_err("create below an object"),
            store.delete("run").await.expect_err("delete"),
        ] {
            assert!(matches!(error, StoreError::Refused { .. }), "{error}");
        }
        assert_eq!(store.head("run").await.expect("head"), None);
        assert_eq!(store.get("run/file/below", 10).await.expect("get"), None);
    }

    #[tokio::test]
    async fn an_object_is_open_to_whoever_may_read_its_file_and_a_document_to_nobody() {
        use std::os::unix::fs::MetadataExt;
        let (_dir, store) = store().await;
        let gid = std::fs::metadata(store.root.path()).expect("stat").gid();
        let mode = |key: &str| std::fs::metadata(store.root.path().join(key)).expect("stat").mode() & 0o777;
        let large = Bytes::from(vec![7; 3 << 20]);
        for (key, readers, expected) in [
            ("a/private", Readers::default(), 0o600),
            ("a/group", Readers { gid, group: true, others: false }, 0o640),
            ("a/but-the-group", Readers { gid, group: false, others: true }, 0o604),
            ("a/all", Readers { gid, group: true, others: true }, 0o644),
        ] {
            for (body, parts) in [(Bytes::from("1"), 8 << 20), (large.clone(), 1 << 20)] {
                let key = format!("{key}-{}", body.len());
                let limits = UploadLimits { part_bytes: parts, parts_in_flight: 2 };
                store.upload(&key, Arc::new((body, readers)), &limits).await.expect("upload");
                assert_eq!(mode(&key), expected, "{key}");
            }
        }
        store.create("a/document", Bytes::from("1")).await.expect("create");
        assert_eq!(mode("a/document"), 0o600);
        assert_eq!((mode("a"), mode(STAGING)), (0o755, 0o700));
    }

    #[tokio::test]
    async fn deleting_the_last_object_takes_its_directories_away() {
        let (_dir, store) = store().await;
        store.create("a/b/c", Bytes::new()).await.expect("create");
        store.create("a/d", Bytes::new()).await.expect("create");
        store.delete("a/b/c").await.expect("delete");
        assert!(!store.root.path().join("a/b").exists());
        assert!(store.root.path().join("a/d").exists());
    }

    #[test]
    fn a_directory_that_is_full_or_read_only_can_be_read() {
        let takes_nothing = |errno| files::takes_nothing(io::Error::from_raw_os_error(errno).kind());
        assert!([libc::ENOSPC, libc::EDQUOT, libc::EROFS].into_iter().all(takes_nothing));
        assert!(![libc::EACCES, libc::EIO, libc::ENOENT].into_iter().any(takes_nothing));
    }

    #[tokio::test]
    async fn the_staging_directory_is_no_key() {
        let (_dir, store) = store().await;
        let error = store.create(".tidemark-staging/x", Bytes::new()).await.expect_err("reserved");
        assert!(matches!(error, StoreError::Key { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_directory_that_is_away_says_nothing_of_any_object_and_is_not_written_to() {
        let (dir, store) = store().await;
        let body = Bytes::from(vec![7; 2 << 20]);
        store.upload("run/k", Arc::new(body.clone()), &UploadLimits::default()).await.expect("upload");
        let (here, aside) = (store.root.path().to_owned(), dir.path().join("aside"));
        std::fs::rename(&here, &aside).expect("rename");
        // Mount points of a file system that is gone: missing, empty, and as left by a daemon that started without the mount.
        for moment in ["missing", "empty", "another store"] {
            match moment {
                "missing" => {}
                "empty" => std::fs::create_dir(&here).expect("create"),
                _ => drop(PosixStore::open(&here).await.expect("another store")),
            }
            let (source, limits) = (Arc::new(Bytes::from("1")), UploadLimits::default());
            for (call, error) in [
                ("get", store.get("run/k", 1 << 30).await.map(drop).expect_err(moment)),
                ("range", store.get_range("run/k", 0..2 << 20).await.map(drop).expect_err(moment)),
                ("head", store.head("run/k").await.map(drop).expect_err(moment)),
                ("list", store.list("run/", false).await.map(drop).expect_err(moment)),
                ("list all", store.list("", true).await.map(drop).expect_err(moment)),
                ("delete", store.delete("run/k").await.expect_err(moment)),
                ("create", store.create("n", Bytes::new()).await.map(drop).expect_err(moment)),
                ("upload", store.upload("n", source, &limits).await.map(drop).expect_err(moment)),
            ] {
                assert!(matches!(error, StoreError::Unavailable { .. }), "{moment}: {call}: {error}");
            }
        }
        assert!(!here.join("n").exists() && !here.join("run").exists());
        std::fs::remove_dir_all(&here).expect("remove");
        std::fs::rename(&aside, &here).expect("rename");
        assert_eq!(store.get("run/k", 1 << 30).await.expect("get"), Some(body));
        assert_eq!(store.head("other").await.expect("head"), None);
    }

    #[tokio::test]
    async fn links_below_the_directory_are_refused_by_name_and_left_out_of_listings() {
        use std::os::unix::fs::symlink;
        let (dir, store) = store().await;
        store.create("old/k", Bytes::from("1")).await.expect("create");
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).expect("create");
        std::fs::write(outside.join("secret"), vec![7; 2 << 20]).expect("write");
        symlink(outside.join("secret"), store.root.path().join("old/link")).expect("link");
        symlink(&outside, store.root.path().join("old/way")).expect("link");
        symlink("k", store.root.path().join("old/beside")).expect("link");
        let keys = store.list("old/", false).await.expect("list").keys;
        assert_eq!(keys.iter().map(|head| head.key.as_str()).collect::<Vec<_>>(), ["old/k"]);
        assert_eq!(store.list("", true).await.expect("list").prefixes, ["old/"]);
        let limits = UploadLimits::default();
        for (call, error) in [
            ("get", store.get("old/link", 1 << 30).await.map(drop).expect_err("a link")),
            ("get beside", store.get("old/beside", 1 << 30).await.map(drop).expect_err("a link")),
            ("range", store.get_range("old/link", 0..2 << 20).await.map(drop).expect_err("a link")),
            ("head", store.head("old/link").await.map(drop).expect_err("a link")),
            ("get below", store.get("old/way/secret", 1 << 30).await.map(drop).expect_err("a link")),
            ("list", store.list("old/way/", false).await.map(drop).expect_err("a link")),
            ("create", store.create("old/way/n", Bytes::new()).await.map(drop).expect_err("a link")),
            ("deeper", store.create("old/way/n/n", Bytes::new()).await.map(drop).expect_err("a link")),
            ("delete", store.delete("old/way/secret").await.expect_err("a link")),
            (
                "replace",
                store
                    .replace("old/way/secret", Arc::new(Bytes::from("1")), &limits)
                    .await
                    .map(drop)
                    .expect_err("a link"),
            ),
        ] {
            let refused =
                matches!(&error, StoreError::Refused { reason, .. } if reason.contains("symbolic link"));
            assert!(refused, "{call}: {error}");
        }
        assert_eq!(std::fs::read_dir(&outside).expect("list").count(), 1);
        assert_eq!(std::fs::metadata(outside.join("secret")).expect("stat").len(), 2 << 20);
    }
}
