//! Every way in which a process ends or gives up a file, and the result at FLUSH: closed or cut.
//!
//! Owns: the ways. Does not own: the use of a cut file afterwards (`closing`, and the suites with daemons).

use crate::closing::shell;
use crate::site::Site;
use rustix::process::Signal;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidemark_namespace::FileState;
use tidemark_tests::cgroup::Cgroup;
use tidemark_tests::process;

/// Limit of filling 32 MiB, which is quick unless the machine swaps or is busy.
const OOM_LIMIT: Duration = Duration::from_secs(60);

fn python(site: &Site, script: &str) {
    let status = Command::new("python3").arg("-c").arg(script).current_dir(site.path("")).status().unwrap();
    println!("{script}: {status}");
}

/// Starts a program that has written part of `f` and waits for its end.
fn holder(site: &Site) -> Child {
    let mut child = Command::new("sh")
        // `read` is a builtin of the shell, because a child would share the descriptor.
        .args(["-c", "exec 3>f; printf part >&3; echo; read never"])
        .current_dir(site.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child
}

/// S-cut: "killed by a signal", by its default action and not only by SIGKILL.
#[test]
fn the_default_action_of_a_signal_leaves_a_cut_file() {
    let Some(site) = Site::passthrough() else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::ABORT, Signal::SEGV] {
        let mut child = holder(&site);
        process::signal(child.id(), signal);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
        assert_eq!(site.state_after_close("f"), FileState::Cut, "{signal:?}");
    }
}

/// If a program handles a signal and then closes, the file is closed.
#[test]
fn a_signal_that_is_handled_is_not_a_cut() {
    let Some(site) = Site::passthrough() else { return };
    shell(&site, "exec 3>f; trap 'exec 3>&-; exit 0' TERM; printf whole >&3; kill -TERM $$; sleep 5");
    assert_eq!(site.state_after_close("f"), FileState::Closed);
}

/// S-cut: "or exit without close", whichever handlers run at exit.
#[test]
fn every_exit_without_close_leaves_a_cut_file() {
    let Some(site) = Site::passthrough() else { return };
    let begin = "import os; f = os.open('f', os.O_WRONLY | os.O_CREAT | os.O_TRUNC); os.write(f, b'part')";
    for end in ["os._exit(0)", "os._exit(3)", "os.abort()", "raise SystemExit(1)", "pass"] {
        python(&site, &format!("{begin}; {end}"));
        assert_eq!(site.state_after_close("f"), FileState::Cut, "{end}");
    }
}

/// exit_group(2) by one thread ends all other threads, in any call.
#[test]
fn one_thread_that_exits_cuts_the_file_that_another_writes() {
    let Some(site) = Site::passthrough() else { return };
    python(
        &site,
        "import os, threading, time
f = os.open('f', os.O_WRONLY | os.O_CREAT)
def write():
    while True:
        os.write(f, b'x' * 65536)
threading.Thread(target=write, daemon=True).start()
while os.fstat(f).st_size == 0:
    time.sleep(0.001)
os._exit(0)",
    );
    assert_eq!(site.state_after_close("f"), FileState::Cut);
    assert!(fs::metadata(site.path("f")).unwrap().len() >= 65536, "what was written is kept");
    // A thread that ends by itself closes no file. The program goes on and closes it.
    python(
        &site,
        "import os, threading
f = os.open('g', os.O_WRONLY | os.O_CREAT)
thread = threading.Thread(target=os.write, args=(f, b'whole'))
thread.start()
thread.join()
os.close(f)
os._exit(0)",
    );
    assert_eq!(site.state_after_close("g"), FileState::Closed);
}

/// A thread that is not the program's first one closes the file, once also after the first thread has ended.
#[test]
fn any_thread_of_a_program_may_close() {
    let Some(site) = Site::passthrough() else { return };
    python(
        &site,
        "import os, threading
f = os.open('f', os.O_WRONLY | os.O_CREAT)
os.write(f, b'whole')
thread = threading.Thread(target=os.close, args=(f,))
thread.start()
thread.join()
os._exit(0)",
    );
    assert_eq!(site.state_after_close("f"), FileState::Closed);
}

/// S-cut: "What counts is the last close", in all four orders of two processes and two ends.
#[test]
fn of_forked_writers_the_last_one_decides() {
    let Some(site) = Site::passthrough() else { return };
    let cases = [
        // The parent closes first. The child is killed last, or closes last.
        ("parent-then-killed", "os.close(f); tell(); wait()", "ask(); die()", FileState::Cut),
        (
            "parent-then-closed",
            "os.close(f); tell(); wait()",
            "ask(); os.close(f); os._exit(0)",
            FileState::Closed,
        ),
        // The parent is killed first, or is killed last.
        ("killed-then-closed", "tell(); die()", "orphan(); os.close(f); os._exit(0)", FileState::Closed),
        ("closed-then-killed", "wait(); die()", "os.close(f); os._exit(0)", FileState::Cut),
        // The child exits without a close of its own. The parent still has the file, and closes it.
        ("exited-then-closed", "wait(); os.close(f); os._exit(0)", "os._exit(0)", FileState::Closed),
    ];
    for (name, parent, child, expected) in cases {
        python(
            &site,
            &format!(
                "import os, signal, time
f = os.open('{name}', os.O_WRONLY | os.O_CREAT)
told, tells = os.pipe()
def tell(): os.write(tells, b'.')
def ask(): os.read(told, 1)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def wait(): os.waitpid(child, 0)
def orphan():
    while os.getppid() == parent: time.sleep(0.001)
parent = os.getpid()
child = os.fork()
if child == 0:
    os.write(f, b'child')
    {child}
else:
    os.write(f, b'parent')
    {parent}"
            ),
        );
        assert_eq!(site.state_after_close(name), expected, "{name}");
        assert_eq!(fs::metadata(site.path(name)).unwrap().len(), 11, "{name}: both wrote");
    }
}

/// S-cut: "a descriptor shared by fork or dup is closed by whoever closes last"; dup2 over it is a close.
#[test]
fn dup2_over_a_descriptor_closes_it_and_a_second_descriptor_keeps_it_open() {
    let Some(site) = Site::passthrough() else { return };
    let begin = "import os, signal; f = os.open('NAME', os.O_WRONLY | os.O_CREAT); os.write(f, b'whole'); ";
    let cases = [
        ("over", "os.dup2(2, f); os.kill(os.getpid(), signal.SIGKILL)", FileState::Closed),
        ("onto-itself", "os.dup2(f, f); os.kill(os.getpid(), signal.SIGKILL)", FileState::Cut),
        ("one-of-two", "os.dup(f); os.close(f); os.kill(os.getpid(), signal.SIGKILL)", FileState::Cut),
        ("both", "g = os.dup(f); os.close(f); os.close(g); os._exit(0)", FileState::Closed),
        ("range", "os.closerange(f, f + 1); os._exit(0)", FileState::Closed),
    ];
    for (name, end, expected) in cases {
        python(&site, &(begin.replace("NAME", name) + end));
        assert_eq!(site.state_after_close(name), expected, "{name}");
    }
}

/// S-cut: "killed by a signal", here by the kernel, which needs the program's memory.
#[test]
fn a_writer_that_the_kernel_kills_for_its_memory_leaves_a_cut_file() {
    let Some(site) = Site::passthrough() else { return };
    let group = match Cgroup::make("closing", 32 << 20) {
        Ok(group) => group,
        Err(why) => {
            return tidemark_tests::machine::left_out(&format!("a memory cgroup cannot be made: {why}"));
        }
    };
    let script = "import os, sys
open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))
f = os.open('f', os.O_WRONLY | os.O_CREAT)
os.write(f, b'part')
memory = []
while True:
    memory.append(bytearray(b'x') * (1 << 20))";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(group.path()).current_dir(site.path(""));
    let output = process::run(&mut command, OOM_LIMIT);
    assert_eq!(output.status.signal(), Some(Signal::KILL.as_raw()), "{output:?}");
    assert_eq!(site.state_after_close("f"), FileState::Cut);
    assert_eq!(fs::read(site.path("f")).unwrap(), b"part");
}

/// A writer in a pid namespace below the daemon's has a pid there too, so its end is distinguished like any other.
#[test]
fn a_writer_in_a_container_is_seen() {
    let Some(site) = Site::passthrough() else { return };
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "sh", "-c", script]).current_dir(site.path(""));
        process::run(&mut command, OOM_LIMIT)
    };
    // The shell runs below the namespace's first process, which cannot kill itself.
    inside("sh -c 'exec 3>f; printf part >&3; kill -KILL $$'; exit 0");
    assert_eq!(site.state_after_close("f"), FileState::Cut);
    inside("exec 3>g; printf whole >&3; exec 3>&-");
    assert_eq!(site.state_after_close("g"), FileState::Closed);
    // When the first process ends, all other processes of the namespace end with it.
    inside(
        "sh -c 'exec 3>h; printf part >&3; echo >ready; sleep 60' & while ! [ -e ready ]; do sleep 0.01; done; exit 0",
    );
    assert_eq!(site.state_after_close("h"), FileState::Cut);
}

/// Variable with the directory that the serving half of the next test shall serve.
const SERVE_ENV: &str = "TIDEMARK_TEST_SERVES_IN_A_PID_NAMESPACE";

/// S-cut: "A process in a pid namespace that the daemon cannot see is believed to have closed its files."
///
/// The daemon's side is this same test, started again in a pid namespace of its own, where no process outside has a
/// pid.
#[test]
fn a_writer_that_the_daemon_cannot_see_is_believed() {
    if std::env::var_os(SERVE_ENV).is_some() {
        return serve_for_a_writer_outside();
    }
    if Site::passthrough().is_none() {
        return;
    }
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "ends::a_writer_that_the_daemon_cannot_see_is_believed", "--nocapture"])
        .env(SERVE_ENV, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut server = command.spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let mut told = |word: &str| {
        // The test harness of the other half prints lines of its own, the last of them unfinished.
        let mut found =
            lines.by_ref().find_map(|line| line.unwrap().split_once(word).map(|(_, rest)| rest.to_owned()));
        found.take().unwrap_or_else(|| panic!("the serving half ended without saying `{word}`"))
    };
    let mount = PathBuf::from(told("serves: "));
    let status = Command::new("sh")
        .args(["-c", "exec 3>f; printf part >&3; kill -KILL $$"])
        .current_dir(&mount)
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    let mut asks = server.stdin.take().unwrap();
    writeln!(asks, "f").unwrap();
    assert_eq!(told("state: "), format!("{:?}", FileState::Closed));
    assert_eq!(told("unseen: "), "1", "and that it was not seen is said");
    drop(asks);
    assert!(server.wait().unwrap().success());
}

/// Serves a mount, and prints the state of each file named on the standard input, until that input ends.
fn serve_for_a_writer_outside() {
    let site = Site::passthrough().expect("the other half has seen that it works here");
    println!("serves: {}", site.path("").display());
    for name in std::io::stdin().lines() {
        println!("state: {:?}", site.state_after_close(name.unwrap()));
        println!("unseen: {}", site.namespace.writers().writers_unseen());
    }
}
