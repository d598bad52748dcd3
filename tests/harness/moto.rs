//! moto as a process: an independent S3 server, with other bugs than ours.
//!
//! Owns: its start with one empty bucket, and its end. Does not own: the environment it runs in (`cargo xtask test` makes
//! it), scripted faults (`s3`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::{machine, process, s3};

/// Limit of a start: Python first reads some hundred modules.
const START_LIMIT: Duration = Duration::from_secs(120);
const BUCKET: &str = "tidemark";

/// A running server; killed when dropped.
#[derive(Debug)]
pub struct Moto {
    child: Child,
    address: String,
    _log: TempDir,
}

impl Moto {
    /// Starts a server. If its environment was not made, returns `None` and leaves the test out.
    pub fn start() -> Option<Self> {
        let interpreter = machine::target_dir().join("tools/moto-venv/bin/python");
        if !interpreter.exists() {
            machine::left_out(&format!(
                "no Python with moto at {}: run `cargo xtask test --only s3`",
                interpreter.display()
            ));
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary directory");
        let log = folder.path().join("log");
        let mut child = Command::new(interpreter)
            .args(["-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a file for its log"))
            .spawn()
            .expect("moto starts");
        let running = process::until(START_LIMIT, || {
            let ended = child.try_wait().expect("looking at moto").is_some();
            let said = std::fs::read_to_string(&log).expect("its log is readable");
            // moto chooses the port itself, so that no other process takes it in between.
            let address = said.lines().find_map(|line| line.split_once("Running on http://"));
            match address.map(|(_, address)| address.trim().to_owned()) {
                Some(address) => Some(Some(address)),
                None => ended.then_some(None),
            }
        });
        // From here on the process ends when this value is dropped.
        let mut moto = Self { child, address: String::new(), _log: folder };
        moto.address = running.flatten().unwrap_or_else(|| panic!("moto: {}", machine::tail(&log, 20)));
        let answer = moto.ask("PUT", BUCKET).expect("moto answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        Some(moto)
    }

    /// Sends a request without a body and returns its whole answer.
    fn ask(&self, method: &str, path: &str) -> io::Result<String> {
        let mut connection = TcpStream::connect(&self.address)?;
        write!(
            connection,
            "{method} /{path} HTTP/1.1\r\nHost: {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            self.address
        )?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Returns the environment of a client.
    pub fn env(&self) -> Vec<(String, String)> {
        s3::env(&format!("http://{}", self.address), "testing", "testing")
    }

    /// Returns `s3://bucket/prefix`.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
