//! The S3 server of the harness as a program, for suites in shell and Python.
//!
//! Owns: one line of output, `ready: endpoint=… bucket=… access_key=… secret=…`, and an end when stdin closes, so that
//! it never outlives the suite. Does not own: the server. The first argument is the address, `127.0.0.1:0` by default.

use std::io::{self, Read, Write};
use tidemark_tests::s3::{S3Options, S3Server};

fn main() -> anyhow::Result<()> {
    let mut options = S3Options::default();
    if let Some(address) = std::env::args().nth(1) {
        options.address = address.parse()?;
    }
    let server = S3Server::start(options)?;
    let mut out = io::stdout();
    writeln!(
        out,
        "ready: endpoint={} bucket={} access_key={} secret={}",
        server.endpoint, server.bucket, server.access_key, server.secret
    )?;
    out.flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
