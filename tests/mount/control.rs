//! The control directory, and the mountpoint itself.

use crate::site::Site;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::process::{Command, Stdio};
use tidemark_fuse::MountError;

/// S-control: "`.tidemark` in the root is not in listings of the root".
#[test]
fn the_control_directory_is_found_by_name_only() {
    let Some(site) = Site::usual() else { return };
    assert_eq!(fs::read_dir(site.path("")).unwrap().count(), 0);
    let mut names: Vec<_> =
        fs::read_dir(site.path(".tidemark")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["latest", "status"]);
    assert_eq!(fs::read(site.path(".tidemark/latest")).unwrap().len(), 300_000);
    let missing = fs::metadata(site.path(".tidemark/nothing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

/// S-control: "Each file's content is fixed when it is opened".
#[test]
fn an_open_control_file_does_not_change_under_its_reader() {
    let Some(site) = Site::usual() else { return };
    let path = site.path(".tidemark/status");
    let mut early = File::open(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "render 1\n");
    assert_eq!(fs::read_to_string(&path).unwrap(), "render 2\n");
    let mut text = String::new();
    early.read_to_string(&mut text).unwrap();
    assert_eq!(text, "render 0\n");
}

/// S-control: "cannot be made, removed, renamed or written by programs: EPERM for the name itself, EROFS for what is in it".
#[test]
fn the_control_directory_cannot_be_changed() {
    let Some(site) = Site::usual() else { return };
    let errno = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    fs::create_dir(site.path("d")).unwrap();
    assert_eq!(errno(fs::rename(site.path("d"), site.path(".tidemark"))), Some(libc::EPERM));
    assert_eq!(errno(fs::rename(site.path(".tidemark"), site.path("x"))), Some(libc::EPERM));
    assert_eq!(errno(fs::remove_dir(site.path(".tidemark"))), Some(libc::EPERM));
    assert_eq!(errno(fs::create_dir(site.path(".tidemark"))), Some(libc::EEXIST));
    assert_eq!(errno(fs::write(site.path(".tidemark/new"), b"")), Some(libc::EROFS));
    assert_eq!(errno(fs::remove_file(site.path(".tidemark/status"))), Some(libc::EROFS));
    let write = OpenOptions::new().write(true).open(site.path(".tidemark/status"));
    assert_eq!(errno(write.map(|_| ())), Some(libc::EROFS));
    // In other directories, the name is like any other.
    fs::create_dir(site.path("d/.tidemark")).unwrap();
    fs::remove_dir(site.path("d/.tidemark")).unwrap();
}

#[test]
fn a_busy_mount_is_not_unmounted_and_names_who_holds_it() {
    let Some(site) = Site::usual() else { return };
    let held = File::create(site.path("held")).unwrap();
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(held)).spawn().unwrap();
    let refused = site.mounted.unmount(false);
    let told = matches!(&refused, Err(MountError::Busy { holders, .. }) if holders.iter().any(|h| h.pid == child.id()));
    assert!(site.path("held").exists(), "a refused unmount leaves the mount as it is");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(told, "{refused:?}");
    site.mounted.unmount(false).unwrap();
    site.mounted.wait().unwrap();
    assert!(!site.path("held").exists());
}

#[test]
fn a_second_mount_at_the_same_place_is_refused() {
    let Some(site) = Site::usual() else { return };
    fs::write(site.path("precious"), b"x").unwrap();
    let at = site.mounted.path().to_owned();
    let tier1 = tidemark_tier1::Tier1::open(tidemark_tier1::Tier1Settings {
        size_bytes: 64 << 20,
        ballast: false,
        medium: tidemark_tier1::MediumChoice::Auto,
    })
    .unwrap();
    let error = tidemark_fuse::mount(
        &tidemark_fuse::MountSettings::new(&at),
        &tier1,
        std::sync::Arc::clone(&site.namespace),
        std::sync::Arc::new(crate::site::Daemon::default()),
    )
    .unwrap_err();
    assert!(matches!(&error, MountError::Occupied { fs_type, .. } if fs_type == "fuse.tidemark"), "{error}");
    assert_eq!(fs::read(site.path("precious")).unwrap(), b"x");
}

/// A mount whose daemon was killed is replaced, not refused.
#[test]
fn a_dead_mount_is_removed_first() {
    let Some(site) = Site::usual() else { return };
    let at = site.outside("dead");
    fs::create_dir(&at).unwrap();
    // The mount's descriptor is closed at once, so every access fails with ENOTCONN.
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let options =
        format!("fd={},rootmode=40000,user_id=0,group_id=0", std::os::fd::AsRawFd::as_raw_fd(&device));
    let options = std::ffi::CString::new(options).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("crashed", &at, "fuse", flags, options.as_c_str()).unwrap();
    drop(device);
    assert_eq!(fs::metadata(&at).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    let tier1 = tidemark_tier1::Tier1::open(tidemark_tier1::Tier1Settings {
        size_bytes: 64 << 20,
        ballast: false,
        medium: tidemark_tier1::MediumChoice::Auto,
    })
    .unwrap();
    let mounted = tidemark_fuse::mount(
        &tidemark_fuse::MountSettings::new(&at),
        &tier1,
        std::sync::Arc::clone(&site.namespace),
        std::sync::Arc::new(crate::site::Daemon::default()),
    )
    .unwrap();
    fs::write(at.join("x"), b"alive").unwrap();
    assert_eq!(fs::read(at.join("x")).unwrap(), b"alive");
    mounted.unmount(false).unwrap();
    fs::remove_dir(&at).unwrap();
}
