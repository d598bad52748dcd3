//! Closed or cut: the process that closed a file, as the kernel reports it at FLUSH.

use crate::site::Site;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use tidemark_namespace::FileState;

pub(crate) fn shell(site: &Site, script: &str) {
    let status = Command::new("sh").arg("-c").arg(script).current_dir(site.path("")).status().unwrap();
    println!("{script}: {status}");
}

/// S-cut: "A file is *closed* when its last writer called close(2)".
#[test]
fn close_makes_a_file_closed() {
    let Some(site) = Site::usual() else { return };
    shell(&site, "exec 3>f; printf whole >&3; exec 3>&-; kill -KILL $$");
    assert_eq!(site.state_after_close("f"), FileState::Closed);
}

/// S-cut: "killed by a signal".
#[test]
fn a_writer_killed_in_mid_write_leaves_a_cut_file() {
    let Some(site) = Site::usual() else { return };
    let mut child = Command::new("sh")
        .arg("-c")
        .arg("exec 3>f; while :; do printf 0123456789 >&3; echo; done")
        .current_dir(site.path(""))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..100 {
        lines.next().unwrap().unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(site.state_after_close("f"), FileState::Cut);
    assert!(fs::metadata(site.path("f")).unwrap().len() >= 1000, "what was written is kept");
}

/// S-cut: "or exit without close, of which one cannot tell whether the file was whole".
#[test]
fn exit_without_close_leaves_a_cut_file() {
    let Some(site) = Site::usual() else { return };
    shell(&site, "exec 3>f; printf part >&3; exit 0");
    assert_eq!(site.state_after_close("f"), FileState::Cut);
}

/// S-cut: "What counts is the last close: a descriptor shared by fork or dup is closed by whoever closes last."
#[test]
fn a_killed_child_that_shares_a_descriptor_does_not_cut_its_parents_file() {
    let Some(site) = Site::usual() else { return };
    shell(&site, "exec 3>f; sh -c 'printf a >&3; kill -KILL $$'; printf b >&3; exec 3>&-");
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    assert_eq!(fs::read(site.path("f")).unwrap(), b"ab");
    shell(&site, "exec 3>g; sh -c 'printf a >&3; exec 3>&-'; printf b >&3; kill -KILL $$");
    assert_eq!(site.state_after_close("g"), FileState::Cut);
}

/// S-cut: a cut file "is kept", and writing it anew makes it whole.
#[test]
fn a_cut_file_written_anew_is_closed() {
    let Some(site) = Site::usual() else { return };
    shell(&site, "exec 3>f; printf part >&3; kill -KILL $$");
    assert_eq!(site.state_after_close("f"), FileState::Cut);
    assert_eq!(fs::read(site.path("f")).unwrap(), b"part");
    fs::File::create(site.path("f")).unwrap().write_all(b"whole").unwrap();
    assert_eq!(site.state_after_close("f"), FileState::Closed);
}

/// S-cut: close-on-exec is the program's own close. (While it runs, execve holds a lock that most of /proc waits for.)
#[test]
fn executing_another_program_with_a_file_open_neither_hangs_nor_cuts() {
    let Some(site) = Site::usual() else { return };
    let mut file = fs::File::create(site.path("f")).unwrap();
    for _ in 0..20 {
        assert!(Command::new("true").status().unwrap().success());
    }
    file.write_all(b"whole").unwrap();
    drop(file);
    assert_eq!(site.state_after_close("f"), FileState::Closed);
    shell(
        &site,
        "exec 3>g; printf whole >&3; exec python3 -c 'import os; os.set_inheritable(3, False); os.execlp(\"true\", \"true\")'",
    );
    assert_eq!(site.state_after_close("g"), FileState::Closed);
}
