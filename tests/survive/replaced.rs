//! The daemon is replaced on purpose, or dies again and again until it is replaced.
//!
//! Owns: upgrades, their rollback, the calls that go on during a crash loop.

use crate::workload::Workload;
use crate::{start, start_with};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{machine, process};

/// Limit of an upgrade. The new daemon has ten seconds to serve, and then the old one.
const UPGRADE_LIMIT: Duration = Duration::from_secs(60);

fn upgrade(daemon: &Daemon, binary: &Path) -> Output {
    let mut command = Command::new(machine::binary("ckptd"));
    command.arg("upgrade").arg("--state-dir").arg(daemon.state_dir()).arg("--binary").arg(binary);
    process::run(&mut command, UPGRADE_LIMIT)
}

fn version(daemon: &Daemon) -> String {
    daemon.ctl_json(&["status"])["version"].as_str().expect("a status has a version").to_owned()
}

#[test]
fn an_upgrade_under_load_changes_the_version_and_nothing_else() {
    let Some(daemon) = start("1GiB") else { return };
    let directory = daemon.mount().join("run");
    fs::create_dir(&directory).unwrap();
    let load = Workload::begin(&directory);
    let (old, keeper) = (version(&daemon), daemon.keeper_pid());
    for binary in ["ckptd-next", "ckptd", "ckptd-next"] {
        std::thread::sleep(Duration::from_millis(300));
        let output = upgrade(&daemon, &machine::binary(binary));
        assert!(output.status.success(), "{}\n{}", shown(&output), daemon.log_tail());
        let now = version(&daemon);
        assert_eq!(now == old, binary == "ckptd", "{binary} serves as {now}");
        load.check();
    }
    assert_eq!(version(&daemon), "9.9.9-next");
    assert_eq!(daemon.ctl_json(&["status"])["keeper_pid"], keeper);
    assert!(load.end() > 1000);
    daemon.flush();
}

#[test]
fn a_binary_that_does_not_serve_is_rolled_back() {
    let Some(daemon) = start("256MiB") else { return };
    let path = daemon.mount().join("open.bin");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"before, ").unwrap();
    // The binaries are a program that ends at once, a program that never becomes ready, and a missing file.
    let scratch = daemon.scratch("binaries");
    let text = scratch.join("text");
    fs::write(&text, "not a program").unwrap();
    let stuck = machine::binary("ckptd-stuck");
    for (binary, why) in [
        (Path::new("/bin/false"), "ended before it served"),
        (&stuck, "did not serve within 10 s"),
        (&text, "cannot be run"),
        (Path::new("/nowhere"), "cannot be run"),
        (&scratch, "cannot be run"),
    ] {
        let output = upgrade(&daemon, binary);
        let binary = binary.display();
        assert_eq!(output.status.code(), Some(1), "{binary}: {}", shown(&output));
        assert!(shown(&output).contains(why), "{binary}: {}", shown(&output));
        file.write_all(b"and after").unwrap();
        assert_eq!(version(&daemon), env!("CARGO_PKG_VERSION"), "{binary}");
    }
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before, and afterand afterand afterand afterand after");
    // The state directory has no keeper.
    let empty = daemon.scratch("empty");
    let mut command = Command::new(machine::binary("ckptd"));
    let output = process::run(command.arg("upgrade").arg("--state-dir").arg(empty), UPGRADE_LIMIT);
    assert_eq!(output.status.code(), Some(5), "{}", shown(&output));
}

#[test]
fn a_crash_loop_keeps_what_is_open_and_says_what_is_wrong_until_another_binary_mends_it() {
    let Some(daemon) = start_with("256MiB", &[("TIDEMARK_STOP_AT", "resume.before_serving")]) else { return };
    let path = daemon.mount().join("open.bin");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(&[1; 100_000]).unwrap();
    rustix::fs::fsetxattr(&file, "user.kept", b"value", rustix::fs::XattrFlags::empty()).unwrap();
    let run = daemon.mount().join("run");
    fs::create_dir(&run).unwrap();
    let mut first = File::create_new(run.join("step1.pt")).unwrap();
    process::signal(daemon.ready().pid, Signal::KILL);
    // From now on, every daemon dies before it serves.
    let said = process::until(Duration::from_secs(30), || {
        let output = daemon.ctl(&["status", "-o", "json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let problem =
            status["problems"].as_array()?.iter().find(|found| found["code"] == "crash_loop")?.clone();
        (output.status.code() == Some(5)).then_some(problem)
    });
    let said = said.unwrap_or_else(|| panic!("the crash loop is not told:\n{}", daemon.log_tail()));
    assert!(said["what"].as_str().unwrap().contains("signal 9"), "{said:#}");
    // Open files go on without any daemon.
    file.write_all(&[2; 100_000]).unwrap();
    let mut bytes = vec![0; 200_000];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
    assert!(bytes[..100_000].iter().all(|byte| *byte == 1) && bytes[100_000..].iter().all(|byte| *byte == 2));
    // The keeper answers closes, syncs, and the first write of an open file. Executing a program closes files too.
    first.write_all(&[3; 5000]).unwrap();
    first.sync_all().unwrap();
    drop(first);
    let text = daemon.scratch("binaries").join("text");
    fs::write(&text, "not a program").unwrap();
    let output = upgrade(&daemon, &text);
    assert!(shown(&output).contains("cannot be run"), "{}", shown(&output));
    let output = upgrade(&daemon, &machine::binary("ckptd-next"));
    assert!(shown(&output).contains("crash loop"), "{}", shown(&output));
    // The open waits for the next daemon.
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(version(&daemon), "9.9.9-next");
    let mut value = [0; 16];
    let length = rustix::fs::fgetxattr(&file, "user.kept", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"value", "stored attributes are not the keeper's to answer");
    drop(file);
    daemon.flush();
    let closed = daemon.checkpoint("run/step1.pt").expect("it is listed");
    assert_eq!(closed["state"], "committed", "closed in the crash loop, and so not cut: {closed:#}");
}
