//! Measures how fast a new file is written to Tier-1, against a new file on /dev/shm and plain memcpy.
//!
//! Owns: the measurement. Alternates the three, from equally warm memory, and prints medians as `RESULT name value`
//! lines. Does not own: the mount (this writes to backing files directly, as passthrough does).
//!
//! `tier1_write [GIB] [ROUNDS]`, by default 4 and 5. Holds at most GIB + 1 GiB of memory in Tier-1, GIB on
//! /dev/shm, and 256 MiB for memcpy.

#![expect(clippy::print_stdout, reason = "the figures are this program's answer")]

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemark_tier1::{Backing, MediumChoice, Tier1, Tier1Settings};

const WRITE_BYTES: usize = 1 << 20;
const MEMCPY_BYTES: usize = 256 << 20;
/// Time after which a machine whose memory stays cold is reported, instead of waiting for ever.
const WARM_WITHIN: Duration = Duration::from_secs(300);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let gib: u64 = arguments.next().map_or(Ok(4), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let file_bytes = gib << 30;
    let tier1 = Tier1::open(Tier1Settings {
        size_bytes: file_bytes + (1 << 30),
        ballast: true,
        medium: MediumChoice::Auto,
    })?;
    println!("capabilities {:?}", tier1.capabilities());
    let source = vec![0x5A_u8; WRITE_BYTES];
    let mut copy = Memcpy { from: vec![1; MEMCPY_BYTES], to: vec![2; MEMCPY_BYTES] };
    let begun = Instant::now();
    wait_warm(&tier1)?;
    println!("RESULT warm_after_s {:.1}", begun.elapsed().as_secs_f64());

    let mut known = Vec::new();
    let mut unknown = Vec::new();
    let mut shm = Vec::new();
    let mut shm_overwrite = Vec::new();
    let mut memcpy = Vec::new();
    for _ in 0..rounds {
        known.push(write_tier1(&tier1, &source, file_bytes, Some(file_bytes))?);
        shm.push(write_shm(&source, file_bytes, &mut shm_overwrite)?);
        unknown.push(write_tier1(&tier1, &source, file_bytes, None)?);
        memcpy.push(copy.run());
    }
    let shm = median(&mut shm);
    let memcpy = median(&mut memcpy);
    for (name, speeds) in [("tier1_predicted", &mut known), ("tier1_unknown", &mut unknown)] {
        let speed = median(speeds);
        println!("RESULT {name}_gb_per_s {:.2}", speed / 1e9);
        println!("RESULT {name}_over_shm {:.2}", speed / shm);
        println!("RESULT {name}_over_memcpy {:.2}", speed / memcpy);
    }
    println!("RESULT shm_new_gb_per_s {:.2}", shm / 1e9);
    println!("RESULT shm_overwrite_gb_per_s {:.2}", median(&mut shm_overwrite) / 1e9);
    println!("RESULT memcpy_gb_per_s {:.2}", memcpy / 1e9);
    create(&tier1)
}

fn wait_warm(tier1: &Tier1) -> Result<(), Box<dyn Error>> {
    let begun = Instant::now();
    while tier1.usage().warm_fraction() < 0.98 {
        if begun.elapsed() > WARM_WITHIN {
            return Err(format!("not warm after {WARM_WITHIN:?}: {:?}", tier1.usage()).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Writes a new file by a descriptor of its own; returns bytes per second.
fn write_tier1(
    tier1: &Arc<Tier1>,
    source: &[u8],
    file_bytes: u64,
    predicted_bytes: Option<u64>,
) -> Result<f64, Box<dyn Error>> {
    wait_warm(tier1)?;
    let begun = Instant::now();
    let backing = tier1.create(predicted_bytes)?;
    let mut file = open_for_writing(&backing)?;
    backing.begin_growth();
    write(&mut file, source, file_bytes)?;
    let took = begun.elapsed();
    drop(file);
    backing.end_growth();
    let begun = Instant::now();
    backing.trim()?;
    println!("  tier1 {predicted_bytes:?}: {took:?}, trim {:?}", begun.elapsed());
    Ok(file_bytes as f64 / took.as_secs_f64())
}

fn write_shm(source: &[u8], file_bytes: u64, overwrite: &mut Vec<f64>) -> Result<f64, Box<dyn Error>> {
    let path = format!("/dev/shm/tier1-write-{}", std::process::id());
    let mut file = File::options().write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    // The first pass warms the memory and is not counted: the host may have taken the pages.
    write(&mut file, source, file_bytes)?;
    let begun = Instant::now();
    std::io::Seek::rewind(&mut file)?;
    write(&mut file, source, file_bytes)?;
    overwrite.push(file_bytes as f64 / begun.elapsed().as_secs_f64());
    drop(file);
    let mut file = File::options().write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    let begun = Instant::now();
    write(&mut file, source, file_bytes)?;
    let took = begun.elapsed();
    println!("  shm: {took:?}");
    Ok(file_bytes as f64 / took.as_secs_f64())
}

fn write(file: &mut File, source: &[u8], file_bytes: u64) -> std::io::Result<()> {
    let mut left = file_bytes;
    while left > 0 {
        file.write_all(source)?;
        left = left.saturating_sub(source.len() as u64);
    }
    Ok(())
}

fn open_for_writing(backing: &Backing) -> std::io::Result<File> {
    File::options().write(true).open(backing.host_path())
}

struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    fn run(&mut self) -> f64 {
        const TIMES: usize = 8;
        let begun = Instant::now();
        for _ in 0..TIMES {
            self.to.copy_from_slice(std::hint::black_box(&self.from));
            std::hint::black_box(&mut self.to);
        }
        (TIMES * MEMCPY_BYTES) as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Measures the cost of create, with ready files and without.
fn create(tier1: &Arc<Tier1>) -> Result<(), Box<dyn Error>> {
    let mut ready = Vec::new();
    let mut made = Vec::new();
    let mut drops = Vec::new();
    for _ in 0..50 {
        wait_warm(tier1)?;
        std::thread::sleep(Duration::from_millis(20));
        let mut files = Vec::new();
        for number in 0..64 {
            let begun = Instant::now();
            files.push(tier1.create(None)?);
            let took = begun.elapsed().as_secs_f64() * 1e6;
            match number {
                0..4 => ready.push(took),
                48.. => made.push(took),
                _ => {}
            }
        }
        for file in files {
            let begun = Instant::now();
            drop(file);
            drops.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    println!("RESULT create_ready_us {:.1}", median(&mut ready));
    println!("RESULT create_made_us {:.1}", median(&mut made));
    println!("RESULT drop_us {:.1}", median(&mut drops));
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
