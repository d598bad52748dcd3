//! Rights of other users on a daemon and its files: a process without rights gets nothing, and a removal is noticed.
//!
//! Owns: modes in a directory store, descriptors, the removal of a mount or a state directory. Does not own: refusals at a
//! start (`refusals`), the state directory's files (unit tests of ckptd).

use std::fs::{self, File, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use tidemark_tests::daemon::{Daemon, http_get_from, shown};
use tidemark_tests::{machine, process};

use crate::site::{CONFIG, MIB, assert_holds, has_problem, noise, options, problems, save, start};

const LIMIT: Duration = Duration::from_secs(15);

/// Returns every object of Tier-3 that holds these bytes.
fn objects(directory: &Path, bytes: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            found.extend(objects(&path, bytes));
        } else if fs::read(&path).unwrap() == bytes {
            found.push(path);
        }
    }
    found
}

#[test]
fn an_object_in_a_directory_is_open_to_nobody_who_could_not_read_its_file() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let cases = [
        // Each row: the file, its mode, its directory's mode, and the object's mode.
        ("open/step1.pt", 0o644, 0o755, 0o644),
        ("open/notes.txt", 0o666, 0o755, 0o644),
        ("own/step1.pt", 0o600, 0o755, 0o600),
        ("own/notes.txt", 0o640, 0o755, 0o640),
        ("closed/step1.pt", 0o644, 0o700, 0o600),
        ("closed/below/notes.txt", 0o644, 0o700, 0o600),
        ("group/notes.txt", 0o644, 0o750, 0o640),
        ("large/step1.pt", 0o600, 0o755, 0o600),
    ];
    let bytes = |number: usize| noise(40 + number as u64, if number == 7 { 9 * MIB } else { 1000 });
    for (number, (path, mode, above, _)) in cases.iter().enumerate() {
        let full = daemon.mount().join(path);
        fs::create_dir_all(full.parent().unwrap()).unwrap();
        let top = daemon.mount().join(path.split('/').next().unwrap());
        // The mode is set before the directory has a file that could be uploaded.
        fs::set_permissions(&top, Permissions::from_mode(*above)).unwrap();
        let file = File::create(&full).unwrap();
        fs::set_permissions(&full, Permissions::from_mode(*mode)).unwrap();
        drop(file);
        fs::write(&full, bytes(number)).unwrap();
    }
    daemon.flush();
    for (number, (path, _, _, expected)) in cases.iter().enumerate() {
        let objects = objects(&daemon.tier3_dir(), &bytes(number));
        assert!(!objects.is_empty(), "{path} is not in Tier-3");
        for object in objects {
            assert_eq!(
                fs::metadata(&object).unwrap().mode() & 0o777,
                *expected,
                "{path}: {}",
                object.display()
            );
            for above in object.ancestors().skip(1).take_while(|above| *above != daemon.tier3_dir()) {
                assert_eq!(fs::metadata(above).unwrap().mode() & 0o022, 0, "{}", above.display());
            }
        }
    }
    daemon.stop();
}

/// A container without CAP_SYS_RESOURCE has 1,024 descriptors, and any process may connect to the HTTP port.
#[test]
fn idle_connections_take_no_descriptors_that_saves_need() {
    let Some(daemon) = start(options("128MiB", CONFIG)) else { return };
    let idle: Vec<_> = (0..300).map(|_| TcpStream::connect(&daemon.ready().http).unwrap()).collect();
    let open = || fs::read_dir(format!("/proc/{}/fd", daemon.ready().pid)).unwrap().count();
    let few = process::until(LIMIT, || (open() < 200).then_some(()));
    assert!(few.is_some(), "{} descriptors", open());
    assert_eq!(daemon.http_get("/healthz"), "ok\n");
    save(&daemon, "run/step1.pt", &noise(50, MIB));
    daemon.flush();
    drop(idle);
}

#[test]
fn opens_beyond_the_descriptor_limit_fail_as_such_and_cut_nothing() {
    if !machine::can_mount() {
        return;
    }
    let daemon = Daemon::start(options("128MiB", CONFIG));
    let pid = daemon.ready().pid;
    save(&daemon, "run/there.bin", b"sealed");
    daemon.flush();
    // The limit is the descriptors that the daemon has now, and some more.
    let has = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() + 24;
    let limit = format!("--nofile={has}:{has}");
    assert!(Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap().success());
    let mut open = Vec::new();
    let run = daemon.mount().join("run");
    let error = loop {
        // Files of this size are registered with the kernel, and each takes a descriptor of the daemon.
        match File::create(run.join(format!("f{}", open.len()))) {
            Ok(mut file) => {
                std::io::Write::write_all(&mut file, &[7; 300_000]).unwrap();
                open.push(file);
            }
            Err(error) => break error,
        }
        assert!(open.len() < 4000, "the limit was never met");
    };
    assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
    let failed = run.join(format!("f{}", open.len()));
    assert!(!failed.exists(), "a failed create leaves no file");
    assert!(File::options().append(true).open(run.join("there.bin")).is_err());
    // The daemon answers commands meanwhile.
    assert!(has_problem(&daemon, "descriptors"), "{:#?}", problems(&daemon));
    drop(open);
    daemon.flush();
    assert_holds(&daemon, "run/there.bin", b"sealed", "an open of it failed");
}

#[test]
fn a_mount_that_is_taken_away_is_said_to_be_gone_and_nothing_else_is_unmounted() {
    let Some(mut daemon) = start(options("128MiB", CONFIG)) else { return };
    save(&daemon, "run/step1.pt", &noise(51, MIB));
    let mount = daemon.mount().to_owned();
    let open = File::create(mount.join("run/log")).unwrap();
    unmount(&mount, UnmountFlags::DETACH).unwrap();
    let told = process::until(LIMIT, || has_problem(&daemon, "mount_gone").then_some(()));
    assert!(told.is_some(), "{:#?}", problems(&daemon));
    let health = http_get_from(&daemon.ready().http, "/healthz").unwrap_err().to_string();
    assert!(health.contains("503"), "{health}");
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "20"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("not at"), "{}", shown(&output));
    // Meanwhile, another mount takes the place.
    assert!(Command::new("mount").args(["-t", "tmpfs", "theirs"]).arg(&mount).status().unwrap().success());
    drop(open);
    // No file of the daemon is open any more, so the daemon ends by itself.
    let ended = daemon.wait_for_end_by_itself(Duration::from_secs(60));
    let theirs = fs::read_to_string("/proc/self/mountinfo")
        .unwrap()
        .lines()
        .any(|line| line.contains(mount.to_str().unwrap()) && line.contains(" - tmpfs theirs "));
    unmount(&mount, UnmountFlags::DETACH).unwrap();
    assert!(theirs, "another's mount was unmounted");
    // A program that lives on has never closed the log, so the daemon may have something to report.
    assert!(ended.is_some_and(|status| matches!(status.code(), Some(0 | 1))), "{ended:?}");
    for untrue in ["the mount is busy", "could not be taken away"] {
        assert!(!daemon.log().contains(untrue), "{}", daemon.log_tail());
    }
}

#[test]
fn a_state_directory_that_is_removed_is_made_again_with_both_sockets() {
    let Some(mut daemon) = start(options("128MiB", CONFIG)) else { return };
    let before = daemon.ready().pid;
    fs::remove_dir_all(daemon.state_dir()).unwrap();
    let answers = process::until(LIMIT, || daemon.ctl(&["status"]).status.success().then_some(()));
    assert!(answers.is_some(), "{}", daemon.log_tail());
    assert!(daemon.log().contains("the state directory was removed"), "{}", daemon.log_tail());
    let socket = daemon.state_dir().join("keeper.sock");
    assert!(process::until(LIMIT, || socket.exists().then_some(())).is_some(), "{}", daemon.log_tail());
    let mut upgrade = Command::new(machine::binary("ckptd"));
    upgrade.arg("upgrade").arg("--state-dir").arg(daemon.state_dir());
    let upgraded = process::run(&mut upgrade, Duration::from_secs(60));
    assert!(upgraded.status.success(), "{}", shown(&upgraded));
    daemon.wait_for_next(before);
    save(&daemon, "run/step1.pt", &noise(52, MIB));
    daemon.stop();
}

#[test]
fn a_machine_without_a_daemon_is_looked_at_all_the_same() {
    if !machine::can_mount() {
        return;
    }
    let nowhere = tempfile::tempdir().unwrap();
    let mut command = Command::new(machine::binary("ckptctl"));
    command.arg("--state-dir").arg(nowhere.path()).arg("doctor");
    let output = process::run(&mut command, LIMIT);
    let text = shown(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for word in ["no daemon answers", "passthrough", "huge_pages", "descriptors", "memory"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}
