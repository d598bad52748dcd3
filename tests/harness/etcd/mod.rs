//! A real etcd as a process, with a data directory of its own.
//!
//! Owns: its start on free ports, its death and its return with the same data, a request or two by hand. Does not own: its demands
//! on clients (`guard`), its Debian package (`cargo xtask test` installs it), the meaning of a lease in it.

pub mod guard;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::net::Host;
use crate::{machine, process};

/// Limit of a start: etcd first elects itself and syncs its disk.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Starts that are tried. Another process may take the free port before etcd listens on it.
const START_ATTEMPTS: u32 = 5;
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A running etcd; killed when dropped.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    client_port: u16,
    peer_port: u16,
    folder: TempDir,
    /// The host in whose network the etcd is; `None` for this process's network.
    host: Option<Host>,
    /// Port at which a guarded etcd demands neither TLS nor a user.
    admin_port: Option<u16>,
}

impl Etcd {
    /// Starts an etcd without data. Where none is installed, returns `None` and leaves the test out.
    pub fn start() -> Option<Self> {
        Self::start_in(None, false)
    }

    /// Starts an etcd as [`Self::start`] does, on a host of a network.
    pub fn start_on(host: &Host) -> Option<Self> {
        Self::start_in(Some(host.clone()), false)
    }

    /// Starts an etcd that demands TLS, a client certificate and [`guard::USER`], who may use keys below `prefix`.
    pub fn start_guarded_on(host: &Host, prefix: &str) -> Option<Self> {
        let etcd = Self::start_in(Some(host.clone()), true)?;
        let ((root, root_password), user) = (guard::ROOT, guard::USER);
        let bytes = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        // The range of all keys below the prefix ends where `/` is replaced by the next character, `0`.
        let (from, to) = (bytes(&format!("{prefix}/")), bytes(&format!("{prefix}0")));
        let permission = format!(r#"{{"permType":"READWRITE","key":"{from}","range_end":"{to}"}}"#);
        for (what, body) in [
            ("user/add", format!(r#"{{"name":"{root}","password":"{root_password}"}}"#)),
            ("role/add", r#"{"name":"root"}"#.to_owned()),
            ("user/grant", format!(r#"{{"user":"{root}","role":"root"}}"#)),
            ("user/add", format!(r#"{{"name":"{user}","password":"{}"}}"#, guard::PASSWORD)),
            ("role/add", r#"{"name":"prefix"}"#.to_owned()),
            ("role/grant", format!(r#"{{"name":"prefix","perm":{permission}}}"#)),
            ("user/grant", format!(r#"{{"user":"{user}","role":"prefix"}}"#)),
            ("enable", "{}".to_owned()),
        ] {
            etcd.administer(what, None, &body);
        }
        Some(etcd)
    }

    /// Changes the password of [`guard::USER`], which ends that user's tokens.
    pub fn change_password(&self, password: &str) {
        let (root, root_password) = guard::ROOT;
        let body = format!(r#"{{"name":"{root}","password":"{root_password}"}}"#);
        let answer = self.administer("authenticate", None, &body);
        let (_, token) = answer.split_once(r#""token":""#).expect("a token");
        let (token, _) = token.split_once('"').expect("the end of a token");
        let body = format!(r#"{{"name":"{}","password":"{password}"}}"#, guard::USER);
        self.administer("user/changepw", Some(token), &body);
    }

    fn administer(&self, what: &str, token: Option<&str>, body: &str) -> String {
        let token = token.map(|token| format!("\r\nAuthorization: {token}")).unwrap_or_default();
        let answer = self.ask(&format!("POST /v3/auth/{what}"), &token, body).expect("etcd answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{what}: {answer}");
        answer
    }

    /// Returns a client's `[etcd]` configuration, without the endpoint and the user.
    pub fn client_files(&self) -> String {
        let keys = guard::keys(self.folder.path()).map(|(key, path)| format!("{key} = {path:?}\n"));
        keys.concat()
    }

    fn start_in(host: Option<Host>, guarded: bool) -> Option<Self> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            machine::left_out("no etcd: run `cargo xtask test --only cluster`, or install etcd-server");
            return None;
        }
        for _ in 0..START_ATTEMPTS {
            // In memory, because etcd waits for its disk. Tests kill processes, never the machine.
            let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
            let folder = folder.expect("a temporary directory");
            let (client_port, peer_port) = (free_port(), free_port());
            let admin_port = guarded.then(free_port);
            if guarded {
                guard::certificates(folder.path(), address(host.as_ref()));
            }
            let child = spawn(&folder, client_port, peer_port, host.as_ref(), admin_port);
            let mut etcd = Self { child, client_port, peer_port, folder, host: host.clone(), admin_port };
            if etcd.is_serving() {
                return Some(etcd);
            }
        }
        panic!("etcd does not start on any port");
    }

    /// Waits until the etcd serves; false if it ended instead. Panics if it does neither in time.
    fn is_serving(&mut self) -> bool {
        let serving = process::until(START_LIMIT, || {
            if self.child.try_wait().expect("looking at etcd").is_some() {
                return Some(false);
            }
            let health = self.ask("GET /health", "", "").ok()?;
            health.contains(r#""health":"true""#).then_some(true)
        });
        serving.unwrap_or_else(|| panic!("etcd: {}", machine::tail(&self.folder.path().join("log"), 20)))
    }

    /// Returns the number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns `host:port`.
    pub fn endpoint(&self) -> String {
        format!("{}:{}", address(self.host.as_ref()), self.client_port)
    }

    /// Returns `http://host:port/prefix`, or `https://…` for a guarded etcd.
    pub fn url(&self, prefix: &str) -> String {
        let scheme = if self.admin_port.is_some() { "https" } else { "http" };
        format!("{scheme}://{}/{prefix}", self.endpoint())
    }

    pub fn signal(&self, signal: Signal) {
        process::signal(self.child.id(), signal);
    }

    /// Sends SIGSTOP and waits until the process is stopped, because a signal takes effect a moment after it was sent.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        let stopped = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T ")).then_some(());
        process::until(ANSWER_LIMIT, stopped).expect("etcd stops");
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.child.kill().expect("killing a child of ours");
        self.child.wait().expect("reaping a child of ours");
    }

    /// Copies the data. The process is stopped meanwhile, for so short a time that no lease ends.
    pub fn backup(&self) -> TempDir {
        let backup = tempfile::tempdir().expect("a temporary directory");
        self.stop();
        copy(&self.folder.path().join("data"), backup.path());
        self.signal(Signal::CONT);
        backup
    }

    /// Starts the killed process on the data of a backup.
    pub fn put_back(&mut self, backup: &TempDir) {
        fs::remove_dir_all(self.folder.path().join("data")).expect("the data of a test");
        copy(&backup.path().join("data"), self.folder.path());
        self.start_again();
    }

    /// Kills the process and starts a new one on the same ports and data.
    pub fn kill_and_start(&mut self) {
        self.kill();
        self.start_again();
    }

    fn start_again(&mut self) {
        self.child =
            spawn(&self.folder, self.client_port, self.peer_port, self.host.as_ref(), self.admin_port);
        assert!(self.is_serving(), "etcd: {}", machine::tail(&self.folder.path().join("log"), 20));
    }

    /// Deletes a key, as a mistaken administrator would.
    pub fn delete(&self, key: &str) {
        let key = base64::engine::general_purpose::STANDARD.encode(key);
        let answer =
            self.ask("POST /v3/kv/deleterange", "", &format!(r#"{{"key":"{key}"}}"#)).expect("etcd answers");
        assert!(answer.contains(r#""deleted":"1""#), "{answer}");
    }

    /// Sends a request and returns its whole answer. `more` is added to the head.
    fn ask(&self, what: &str, more: &str, body: &str) -> io::Result<String> {
        let at = self.admin_port.map_or_else(|| self.endpoint(), |port| format!("127.0.0.1:{port}"));
        let mut connection = match &self.host {
            Some(host) => host.inside(|| TcpStream::connect(&at))?,
            None => TcpStream::connect(&at)?,
        };
        connection.set_read_timeout(Some(ANSWER_LIMIT))?;
        let length = body.len();
        write!(
            connection,
            "{what} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\nConnection: close{more}\r\n\r\n{body}"
        )?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Copies a folder with everything in it into another one.
fn copy(folder: &Path, into: &Path) {
    let copied = Command::new("cp").arg("-a").args([folder, into]).status().expect("cp runs");
    assert!(copied.success(), "{} is not copied", folder.display());
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

fn address(host: Option<&Host>) -> Ipv4Addr {
    host.map_or(Ipv4Addr::LOCALHOST, Host::address)
}

fn spawn(
    folder: &TempDir,
    client_port: u16,
    peer_port: u16,
    host: Option<&Host>,
    admin_port: Option<u16>,
) -> Child {
    let address = address(host);
    let scheme = if admin_port.is_some() { "https" } else { "http" };
    let (client, peer) =
        (format!("{scheme}://{address}:{client_port}"), format!("http://{address}:{peer_port}"));
    let listen = match admin_port {
        Some(admin) => guard::flags(folder.path(), &client, admin),
        None => vec!["--listen-client-urls".to_owned(), client.clone()],
    };
    let log = File::options().append(true).create(true).open(folder.path().join("log"));
    let mut command = Command::new("etcd");
    command
        .args(["--name", "one", "--log-level", "warn"])
        .arg("--data-dir")
        .arg(folder.path().join("data"))
        .args(listen)
        .args(["--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("one={peer}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.expect("a file for its log"));
    match host {
        Some(host) => host.spawn(&mut command),
        None => command.spawn(),
    }
    .expect("etcd starts")
}
