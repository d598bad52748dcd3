//! Mounts a FUSE file system at a path and unmounts it.
//!
//! Owns: the state of the mountpoint, opening `/dev/fuse`, mount(2), umount(2). Does not own: the session that
//! answers requests (`session`), fusermount3 (`fusermount`).
//!
//! The daemon opens the device and mounts it itself, so that the descriptor exists apart from the session loop: a
//! process that holds a duplicate of it keeps the mount alive while a daemon is replaced.

use crate::error::MountError;
use crate::fusermount;
use crate::holders::holders;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::{CString, OsString};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Type of the mount in /proc/self/mountinfo.
pub(crate) const FS_TYPE: &str = "fuse.tidemark";
/// Source of the mount.
pub(crate) const SOURCE: &str = "tidemark";

/// How long an existing mount may take to answer a stat before it counts as live but stuck. A dead mount answers at
/// once.
const STAT_PATIENCE: Duration = Duration::from_secs(2);

/// The most dead mounts that are removed. More of them, stacked on one path, are not the leftovers of crashes.
const DEAD_MOUNTS_MAX: usize = 16;

/// A mount whose INIT has not been answered yet.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) device: OwnedFd,
    /// Whether this process mounted it, not fusermount3.
    pub(crate) privileged: bool,
    /// Whether other users may enter.
    pub(crate) allow_other: bool,
}

/// Mounts at `mountpoint`, which [`prepare`] has returned. `nosuid,nodev,default_permissions`, and `allow_other` where
/// the system permits it.
pub(crate) fn attach(mountpoint: &Path) -> Result<Attached, MountError> {
    let device = open_device()?;
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let options = CString::new(options).expect("numbers and words have no zero byte");
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    match rustix::mount::mount(SOURCE, mountpoint, FS_TYPE, flags, options.as_c_str()) {
        Ok(()) => Ok(Attached { device, privileged: true, allow_other: true }),
        Err(rustix::io::Errno::PERM) => fusermount::attach(mountpoint),
        Err(errno) => Err(MountError::Mount { path: mountpoint.to_owned(), source: errno.into() }),
    }
}

/// Opens `/dev/fuse`, close-on-exec.
pub(crate) fn open_device() -> Result<OwnedFd, MountError> {
    match OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(file) => Ok(file.into()),
        Err(source) => Err(match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoDevice { source },
            _ => MountError::DeviceRefused { source },
        }),
    }
}

/// Unmounts. Unless `lazy`, fails with [`MountError::Busy`] while anything is open below.
pub(crate) fn detach(mountpoint: &Path, lazy: bool, privileged: bool) -> Result<(), MountError> {
    if !privileged {
        return fusermount::detach(mountpoint, lazy);
    }
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::BUSY) => {
            Err(MountError::Busy { path: mountpoint.to_owned(), holders: holders(mountpoint) })
        }
        Err(errno) => Err(MountError::Unmount { path: mountpoint.to_owned(), source: errno.into() }),
    }
}

/// Prepares the mountpoint: creates it if missing, and removes a dead mount on it. Refuses a live mount, a directory
/// that is not empty, and anything but a directory. Returns its absolute path without symlinks.
pub(crate) fn prepare(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let path = resolve(mountpoint)?;
    let mut removed = 0;
    while let Some(present) = mount_at(&path)? {
        if removed == DEAD_MOUNTS_MAX || !is_dead(&path) {
            return Err(MountError::Occupied { path, fs_type: present.fs_type, source_name: present.source });
        }
        remove_dead(&path)?;
        removed += 1;
    }
    match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(&path)
                .map_err(|source| MountError::MakeDirectory { path: path.clone(), source })?;
        }
        Err(source) => return Err(MountError::Inspect { path, source }),
        Ok(metadata) if !metadata.is_dir() => return Err(MountError::NotADirectory { path }),
        Ok(_) => {
            let mut entries =
                fs::read_dir(&path).map_err(|source| MountError::Inspect { path: path.clone(), source })?;
            if let Some(entry) = entries.next() {
                let entry = entry.map_err(|source| MountError::Inspect { path: path.clone(), source })?;
                let entry = entry.file_name().to_string_lossy().into_owned();
                return Err(MountError::NotEmpty { path, entry });
            }
        }
    }
    Ok(path)
}

/// Returns the absolute path, with the parent's symlinks followed. The last part is not examined: on a dead mount even
/// that fails.
fn resolve(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let inspect = |source| MountError::Inspect { path: mountpoint.to_owned(), source };
    if fs::symlink_metadata(mountpoint).is_ok_and(|metadata| metadata.is_symlink()) {
        return fs::canonicalize(mountpoint).map_err(inspect);
    }
    let absolute = std::path::absolute(mountpoint).map_err(inspect)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return fs::canonicalize(&absolute).map_err(inspect);
    };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(parent.join(name)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(parent)
                .map_err(|source| MountError::MakeDirectory { path: parent.to_owned(), source })?;
            fs::canonicalize(parent).map(|parent| parent.join(name)).map_err(inspect)
        }
        Err(source) => Err(inspect(source)),
    }
}

fn remove_dead(path: &Path) -> Result<(), MountError> {
    let dead = |source| MountError::DeadMount { path: path.to_owned(), source };
    match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) => {
            tracing::info!(path = %path.display(), "removed a dead mount");
            Ok(())
        }
        Err(rustix::io::Errno::PERM) => {
            fusermount::detach(path, true).map_err(|error| dead(io::Error::other(error)))
        }
        Err(errno) => Err(dead(errno.into())),
    }
}

/// Returns whether the daemon of a mount is gone: such a mount answers everything with ENOTCONN. The stat runs in a
/// thread of its own, because a daemon that lives but hangs would block this thread too.
fn is_dead(path: &Path) -> bool {
    // One answer, at most.
    let (answer, answered) = mpsc::sync_channel(1);
    let path = path.to_owned();
    let started = std::thread::Builder::new().name("mount-stat".into()).spawn(move || {
        let dead = fs::metadata(&path).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN));
        // If the patience has ended, the receiver is gone, and the answer is not needed.
        let _ = answer.send(dead);
    });
    started.is_ok() && answered.recv_timeout(STAT_PATIENCE).unwrap_or(false)
}

#[derive(Debug, PartialEq, Eq)]
struct Present {
    fs_type: String,
    source: String,
    /// Major and minor number; `None` where they cannot be read.
    device: Option<(u32, u32)>,
}

/// Returns the device number of the mount at `path`, as `/proc/locks` names it.
pub(crate) fn device_at(path: &Path) -> Option<(u32, u32)> {
    mount_at(path).ok()??.device
}

/// Returns the mount exactly at `path`, the topmost when there are several.
fn mount_at(path: &Path) -> Result<Option<Present>, MountError> {
    let table = fs::read("/proc/self/mountinfo")
        .map_err(|source| MountError::Inspect { path: path.to_owned(), source })?;
    Ok(find_mount(&table, path))
}

/// Returns whether a Tidemark mount is the topmost one at `path`.
pub(crate) fn is_ours_at(path: &Path) -> Result<bool, MountError> {
    let present = mount_at(path)?;
    Ok(present.is_some_and(|present| present.fs_type == FS_TYPE && present.source == SOURCE))
}

/// Finds the mount in a table of proc_pid_mountinfo(5): field 3 is the device, field 5 the mount point, with blanks and
/// backslashes as three octal digits; the type and the source follow a lone dash.
fn find_mount(table: &[u8], path: &Path) -> Option<Present> {
    let mut found = None;
    for line in table.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ');
        let device = fields.nth(2).and_then(device_number);
        let Some(point) = fields.nth(1) else { continue };
        if OsString::from_vec(unescape(point)) != path {
            continue;
        }
        let mut after_dash = fields.skip_while(|field| *field != b"-").skip(1);
        let (Some(fs_type), Some(source)) = (after_dash.next(), after_dash.next()) else { continue };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        found = Some(Present { fs_type: text(fs_type), source: text(&unescape(source)), device });
    }
    found
}

fn device_number(field: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = std::str::from_utf8(field).ok()?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|digits| first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        if let Some(digits) = octal {
            let value = digits.iter().fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            plain.push(u8::try_from(value & 0xff).expect("masked to one byte"));
            rest = &after[3..];
        } else {
            plain.push(first);
            rest = after;
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 0:20 / / rw shared:1 - ext4 /dev/vda rw\n\
        40 22 0:33 / /mnt/with\\040blank rw,nosuid shared:9 master:1 - fuse.tidemark tidemark rw\n\
        41 22 0:34 / /ckpt rw - tmpfs first rw\n\
        42 22 0:35 / /ckpt rw - fuse.x second rw\n";

    #[test]
    fn the_topmost_mount_at_a_path_is_found() {
        let found = find_mount(TABLE, Path::new("/ckpt")).unwrap();
        assert_eq!((found.fs_type.as_str(), found.source.as_str()), ("fuse.x", "second"));
        assert_eq!(find_mount(TABLE, Path::new("/mnt/with blank")).unwrap().fs_type, "fuse.tidemark");
        assert_eq!(find_mount(TABLE, Path::new("/ck")), None);
        let ours = |path: &str| {
            let present = find_mount(TABLE, Path::new(path));
            present.is_some_and(|present| {
                (present.fs_type.as_str(), present.source.as_str()) == (FS_TYPE, SOURCE)
            })
        };
        assert!(ours("/mnt/with blank") && !ours("/ckpt") && !ours("/gone"));
    }

    #[test]
    fn odd_tables_find_nothing() {
        for table in
            [&b""[..], b"\n\n", b"1 2 3 4", b"1 2 3 4 /ckpt", b"1 2 3 4 /ckpt rw -", b"\xff \xff \\4"]
        {
            assert_eq!(find_mount(table, Path::new("/ckpt")), None);
        }
        assert_eq!(unescape(b"a\\04"), b"a\\04");
    }

    #[test]
    fn a_directory_with_something_in_it_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("precious"), b"x").unwrap();
        let error = prepare(dir.path()).unwrap_err();
        assert!(matches!(&error, MountError::NotEmpty { entry, .. } if entry == "precious"), "{error}");
        assert!(dir.path().join("precious").exists());
    }

    #[test]
    fn a_missing_mountpoint_is_made_and_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let made = prepare(&dir.path().join("a/b")).unwrap();
        assert!(made.is_dir());
        fs::write(dir.path().join("file"), b"").unwrap();
        let error = prepare(&dir.path().join("file")).unwrap_err();
        assert!(matches!(error, MountError::NotADirectory { .. }), "{error}");
    }

    #[test]
    fn a_live_mount_is_refused_and_named() {
        let error = prepare(Path::new("/proc")).unwrap_err();
        assert!(matches!(&error, MountError::Occupied { fs_type, .. } if fs_type == "proc"), "{error}");
    }
}
