//! Compares splice, a buffer and a mapping for moving bytes from a socket into a file in memory.
//!
//! Owns: the measurement that `design/0001-links.md` quotes: one sender by sendfile, one receiver with each method in
//! turn, over loopback, both files warm. Run: `cargo run --release -p tidemark-transport --example receive [MIB]
//! [ROUNDS]`.

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Instant;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::pipe::SpliceFlags;
use rustix::time::{ClockId, clock_gettime};

type Failed = Box<dyn Error + Send + Sync>;

const WAYS: &[&str] =
    &["splice 256K", "splice 1M", "buffer 64K", "buffer 256K", "buffer 1M", "mapping", "splice out"];

fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let bytes = arguments.next().transpose()?.unwrap_or(1024) << 20;
    let rounds = arguments.next().transpose()?.unwrap_or(3);
    let (from, into) = (memory(bytes)?, memory(bytes)?);
    for round in 0..rounds {
        for way in WAYS {
            let (seconds, sent, received) = carry(&from, &into, bytes, way)?;
            let giga = to_f64(bytes) / 1e9;
            writeln!(
                std::io::stdout(),
                "{round} {way:12} {:5.2} GB/s  CPU s/GB: send {:.3} receive {:.3} sum {:.3}",
                giga / seconds,
                sent / giga,
                received / giga,
                (sent + received) / giga
            )?;
        }
    }
    Ok(())
}

fn to_f64(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 12).unwrap_or(u32::MAX)) * 4096.0
}

/// Makes a file in memory whose pages are all there.
fn memory(bytes: u64) -> Result<File, Failed> {
    let mut file = File::from(memfd_create("bytes", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, bytes)?;
    let page = vec![7; 1 << 20];
    for _ in 0..bytes >> 20 {
        file.write_all(&page)?;
    }
    Ok(file)
}

fn cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    f64::from(i32::try_from(now.tv_sec).unwrap_or(i32::MAX))
        + f64::from(i32::try_from(now.tv_nsec).unwrap_or(0)) / 1e9
}

fn carry(from: &File, into: &File, bytes: u64, way: &str) -> Result<(f64, f64, f64), Failed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = TcpStream::connect(listener.local_addr()?)?;
    let (mut at, _) = listener.accept()?;
    let start = Instant::now();
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            if way == "splice out" { splice_out(from, &to, bytes) } else { send(from, &to, bytes) }
        });
        let before = cpu_seconds();
        match way {
            "splice 256K" | "splice out" => splice_in(&at, into, bytes, 256 << 10)?,
            "splice 1M" => splice_in(&at, into, bytes, 1 << 20)?,
            "buffer 64K" => buffer(&mut at, into, bytes, 64 << 10)?,
            "buffer 256K" => buffer(&mut at, into, bytes, 256 << 10)?,
            "buffer 1M" => buffer(&mut at, into, bytes, 1 << 20)?,
            _ => mapping(&mut at, into)?,
        }
        let received = cpu_seconds() - before;
        let sent = sender.join().map_err(|_| "the sender panicked")??;
        Ok((start.elapsed().as_secs_f64(), sent, received))
    })
}

fn send(from: &File, to: &TcpStream, bytes: u64) -> Result<f64, Failed> {
    let before = cpu_seconds();
    let mut at = 0;
    while at < bytes {
        rustix::fs::sendfile(to, from, Some(&mut at), 1 << 20)?;
    }
    Ok(cpu_seconds() - before)
}

fn pipe(bytes: usize) -> Result<(OwnedFd, OwnedFd), Failed> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::pipe::fcntl_setpipe_size(&write, bytes)?;
    Ok((read, write))
}

fn splice_out(from: &File, to: &TcpStream, bytes: u64) -> Result<f64, Failed> {
    let before = cpu_seconds();
    let (read, write) = pipe(1 << 20)?;
    let mut at = 0;
    while at < bytes {
        let mut held = rustix::pipe::splice(from, Some(&mut at), &write, None, 1 << 20, SpliceFlags::MOVE)?;
        while held > 0 {
            held -= rustix::pipe::splice(&read, None, to, None, held, SpliceFlags::MORE)?;
        }
    }
    Ok(cpu_seconds() - before)
}

fn splice_in(socket: &TcpStream, into: &File, bytes: u64, step: usize) -> Result<(), Failed> {
    let (read, write) = pipe(step)?;
    let mut at = 0;
    while at < bytes {
        let mut held = rustix::pipe::splice(socket, None, &write, None, step, SpliceFlags::MOVE)?;
        while held > 0 {
            held -= rustix::pipe::splice(&read, None, into, Some(&mut at), held, SpliceFlags::MOVE)?;
        }
    }
    Ok(())
}

fn buffer(socket: &mut TcpStream, into: &File, bytes: u64, step: usize) -> Result<(), Failed> {
    let mut buffer = vec![0; step];
    let mut at = 0;
    while at < bytes {
        let read = socket.read(&mut buffer)?;
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let written = rustix::io::pwrite(into, rest, at)?;
            rest = &rest[written..];
            at += written as u64;
        }
    }
    Ok(())
}

fn mapping(socket: &mut TcpStream, into: &File) -> Result<(), Failed> {
    // SAFETY: the file is in this process's memory, and no code cuts it shorter while it is mapped.
    let mut map = unsafe { memmap2::MmapMut::map_mut(into)? };
    for part in map.chunks_mut(1 << 20) {
        socket.read_exact(part)?;
    }
    Ok(())
}
