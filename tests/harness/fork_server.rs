//! A Python that has loaded a script's packages and forks for each start of the script. In a short job, loading is most of the cost.
//!
//! Owns: the process that forks, and the exit status of each fork. Does not own: the environment and the arguments of a start (`python`).

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// Bytes by which the environment of a start may exceed this process's own.
const ENVIRONMENT_ROOM: usize = 16 << 10;
/// A variable that only reserves length: the kernel shows no more of an environment than the process was started with.
const ROOM_ENV: &str = "TIDEMARK_FORK_SERVER_ROOM";

/// A fork server. Dropping it ends the server, but not the processes that it started.
#[derive(Debug)]
pub(crate) struct ForkServer {
    child: Child,
    starts: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// A process that a fork server started.
#[derive(Debug)]
pub(crate) struct Forked {
    pid: u32,
    status: PathBuf,
    ended: Option<ExitStatus>,
}

impl ForkServer {
    /// Starts `python`, a command without arguments, and loads the imports of `script`. If an import starts threads, returns `None`,
    /// because a fork would lack them.
    pub(crate) fn start(mut python: Command, script: &Path) -> Option<Self> {
        let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("harness/fork_server.py");
        python.arg("-u").arg(server).arg(script).env(ROOM_ENV, "x".repeat(ENVIRONMENT_ROOM));
        let mut child = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a fork server");
        let starts = child.stdin.take().expect("the pipe was asked for");
        let answers = BufReader::new(child.stdout.take().expect("the pipe was asked for"));
        let mut server = Self { child, starts, answers };
        match server.answer().as_str() {
            "READY" => Some(server),
            "THREADS" => None,
            other => panic!("a fork server for {} says {other:?}", script.display()),
        }
    }

    /// Starts the script with the arguments and the environment of `command`. Makes `out` and `err`; `status` appears at the script's end.
    pub(crate) fn fork(
        &mut self,
        arguments: &[&str],
        command: &Command,
        out: &Path,
        err: &Path,
        status: PathBuf,
    ) -> Forked {
        for path in [out, err] {
            File::create(path).expect("a file for what it prints");
        }
        let start = serde_json::json!({
            "arguments": arguments, "env": environment(command), "out": out, "err": err, "status": status,
        });
        writeln!(self.starts, "{start}").expect("a fork server takes a start");
        let answer = self.answer();
        let pid = answer.parse().unwrap_or_else(|_| panic!("a fork server says {answer:?} instead of a pid"));
        Forked { pid, status, ended: None }
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("a fork server answers");
        line.trim_end().to_owned()
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Forked {
    pub(crate) fn id(&self) -> u32 {
        self.pid
    }

    /// Returns the exit status, if the process has ended.
    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = fs::read_to_string(&self.status).ok().map(|said| status_of(&said));
        }
        self.ended
    }
}

/// Turns `exit N` or `signal N` into a status as wait(2) encodes it: the signal in the low bits, the exit status above them.
fn status_of(said: &str) -> ExitStatus {
    let (kind, number) = said.split_once(' ').unwrap_or_else(|| panic!("{said:?} is no end of a process"));
    let number: i32 = number.parse().unwrap_or_else(|_| panic!("{said:?} is no end of a process"));
    ExitStatus::from_raw(if kind == "exit" { number << 8 } else { number })
}

/// Returns the environment that a process started by `command` would have.
fn environment(command: &Command) -> BTreeMap<String, String> {
    let text = |name: &OsStr| name.to_str().expect("the environment of tests is UTF-8").to_owned();
    let mut all: BTreeMap<_, _> = env::vars_os().map(|(name, value)| (text(&name), text(&value))).collect();
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => all.insert(text(name), text(value)),
            None => all.remove(&text(name)),
        };
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_as_the_kernel_tells_it() {
        assert!(status_of("exit 0").success());
        assert_eq!(status_of("exit 143").code(), Some(143));
        assert_eq!(status_of("signal 9").signal(), Some(9));
    }

    /// `/proc` shows a forked process with the environment of its own start.
    #[test]
    fn each_start_has_its_own_environment_and_its_own_end() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let script = folder.path().join("job.py");
        let text = "import os, sys\n\
                    own = open('/proc/self/environ').read().split('\\0')\n\
                    assert os.environ['RANK'] == sys.argv[1] and f'RANK={sys.argv[1]}' in own\n\
                    assert 'GONE' not in os.environ and not any(line.startswith('GONE=') for line in own)\n\
                    assert __name__ == '__main__' and not sys.stdin.read()\n\
                    print(os.path.basename(__file__))\n\
                    sys.exit(int(sys.argv[1]))\n";
        fs::write(&script, text).expect("a script");
        let python = || Command::new("python3");
        let mut before = python();
        before.env("GONE", "1");
        let mut server = ForkServer::start(before, &script).expect("nothing starts threads");
        let file = |name: String| folder.path().join(name);
        let mut started: Vec<_> = (3..5)
            .map(|rank| {
                let mut command = python();
                command.env("RANK", rank.to_string()).env_remove("GONE");
                let (out, err) = (file(format!("out{rank}")), file(format!("err{rank}")));
                let arguments = rank.to_string();
                (rank, server.fork(&[&arguments], &command, &out, &err, file(format!("status{rank}"))))
            })
            .collect();
        for (rank, forked) in &mut started {
            let end = crate::process::until(std::time::Duration::from_secs(20), || forked.try_wait());
            let said = fs::read_to_string(file(format!("err{rank}"))).expect("what it said");
            assert_eq!(end.and_then(|end| end.code()), Some(*rank), "{said}");
            assert_eq!(fs::read_to_string(file(format!("out{rank}"))).expect("what it printed"), "job.py\n");
        }
    }
}
