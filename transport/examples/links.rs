//! Measures the cost of moving bytes between two nodes, plain, authenticated and encrypted, with one stream and with several.
//!
//! Owns: the measurement that `design/0002-encrypted-bulk.md` quotes: two links in one process, over loopback, files in memory and warm,
//! variants in turn. Run: `cargo run --release -p tidemark-transport --example links [MIB] [ROUNDS] [WAY]`.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::time::{ClockId, clock_gettime};
use tidemark_transport::certs::{self, Certs};
use tidemark_transport::tcp::{Security, Settings, Tcp};
use tidemark_transport::{
    Address, BytesSink, BytesSource, Grant, Identity, Link, Peer, Refusal, Service, Unpaced,
};

type Failed = Box<dyn Error + Send + Sync>;

struct Echo;

#[async_trait]
impl Service for Echo {
    async fn call(&self, _from: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        Ok(body)
    }

    fn tell(&self, _from: Peer, _body: Bytes) {}

    fn epoch(&self) -> u64 {
        0
    }

    fn saw_epoch(&self, _from: &Peer, _epoch: u64) {}

    fn connected(&self, _peer: &Peer) {}

    fn disconnected(&self, _peer: &Peer) {}
}

struct Sink(File);

impl BytesSink for Sink {
    fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn memory(bytes: u64) -> Result<File, Failed> {
    let mut file = File::from(memfd_create("bytes", MemfdFlags::CLOEXEC)?);
    let page = vec![7; 1 << 20];
    for _ in 0..bytes >> 20 {
        file.write_all(&page)?;
    }
    Ok(file)
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    f64::from(i32::try_from(now.tv_sec).unwrap_or(i32::MAX))
        + f64::from(i32::try_from(now.tv_nsec).unwrap_or(0)) / 1e9
}

#[tokio::main]
async fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || arguments.next().map(|text| text.parse::<u64>()).transpose();
    let bytes = number()?.unwrap_or(1024) << 20;
    let rounds = number()?.unwrap_or(3);
    let only = arguments.next();
    let giga = f64::from(u32::try_from(bytes >> 20)?) * 1.048_576e-3;
    let folder = std::env::temp_dir().join(format!("tidemark-links-{}", std::process::id()));
    certs::init(&folder, "bench")?;
    for node in ["a", "b"] {
        certs::issue(&folder, node, &[])?;
    }
    let (from, into) = (Arc::new(memory(bytes)?), Arc::new(Sink(memory(bytes)?)));
    for round in 0..rounds {
        let ways = ["plain", "authenticated", "encrypted"];
        let all = [1, 2].into_iter().flat_map(|streams| ways.map(|way| (way, streams)));
        for (way, bulk_streams) in all.filter(|(way, _)| only.as_deref().is_none_or(|only| only == *way)) {
            let mut nodes = vec![];
            for node in ["a", "b"] {
                let identity =
                    Identity { cluster: "bench".into(), node: node.into(), incarnation: 1, start: 1 };
                let security = if way == "plain" {
                    Security::Insecure { off_loopback: false }
                } else {
                    Security::Certificates(Certs::load(&folder, "bench", node)?)
                };
                let encrypt_bulk = way == "encrypted";
                let listen = "127.0.0.1:0".parse()?;
                let settings = Settings { listen, security, encrypt_bulk, bulk_streams };
                let link = Tcp::listen(identity, settings, Arc::new(Echo)).await?;
                let address = Address { node: node.into(), address: link.local_address().to_string() };
                nodes.push((link, address));
            }
            let [(a, _), (b, at_b)] = &nodes[..] else { return Err("two nodes were made".into()) };
            let into = Arc::clone(&into) as Arc<dyn BytesSink>;
            let token = b.grant("a", Grant::Receive { into, limit_bytes: bytes });
            let source = Arc::clone(&from) as Arc<dyn BytesSource>;
            let (begun, before) = (Instant::now(), cpu_seconds());
            a.push(at_b, token, source, std::slice::from_ref(&(0..bytes)), &Unpaced).await?;
            let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds() - before);
            let mut call_seconds = vec![];
            for _ in 0..1000 {
                let begun = Instant::now();
                a.call(at_b, Bytes::from_static(b"hello"), Duration::from_secs(5)).await?;
                call_seconds.push(begun.elapsed());
            }
            call_seconds.sort();
            writeln!(
                std::io::stdout(),
                "{round} {way:13} {bulk_streams} streams {:5.2} GB/s  CPU s/GB, both ends: {:.3}  call: median {:?} p99 {:?}",
                giga / seconds,
                cpu / giga,
                call_seconds[500],
                call_seconds[990],
            )?;
            tokio::join!(a.close(), b.close());
        }
    }
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
