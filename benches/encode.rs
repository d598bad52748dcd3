//! How much smaller do tensors get on their way to Tier-3, and how fast, on one core?
//!
//! Owns: tensors like those of training, each codec over them, both ways, against plain zstd and memcpy. Does not own: the
//! codecs; the upload, which the network bounds (`upload`, `upload_s3`).

use std::time::Instant;
use tidemark_benches::{Bench, compare::Compared, memory};
use tidemark_kernels::encoding::{Codec, Decoder, Encoder, LEVEL};

/// Bytes that are encoded at a time.
const CHUNK_BYTES: usize = 8 << 20;
/// Size of a tensor: so large that each round takes a second at the slowest, and does not fit in caches.
const BYTES_MAX: u64 = 128 << 20;
/// Level 3 is zstd's own default.
const LEVELS: [i32; 2] = [LEVEL, 3];

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    bench.options.size_bytes = bench.options.size_bytes.min(BYTES_MAX);
    for (name, bytes) in tensors(usize::try_from(bench.options.size_bytes)?) {
        let mut copy = vec![0; bytes.len()];
        let copied = memory::copy_bytes_per_s(&bytes, &mut copy) / 1e9;
        bench.say(&format!("tensor {name}: {} bytes, memcpy {copied:.2} GB/s", bytes.len()))?;
        for level in LEVELS {
            let mut zstd = Measured::new(level)?;
            let mut planes = Measured::new(level)?;
            let mut sizes = (0, 0);
            let encode = bench.alternate(
                || planes.encode(Codec::Planes, &bytes).map(|(rate, size)| (sizes.0 = size, rate).1),
                || zstd.encode(Codec::Zstd, &bytes).map(|(rate, size)| (sizes.1 = size, rate).1),
            )?;
            let decode = bench.alternate(|| planes.decode(&bytes), || zstd.decode(&bytes))?;
            let share = |size: usize| size as f64 / bytes.len() as f64;
            let sizes = Compared::new(share(sizes.0), share(sizes.1));
            let against = format!("plain zstd at level {level}");
            bench.result(&format!("encode_{name}_planes_level_{level}"), "GB/s", &against, encode)?;
            bench.result(&format!("decode_{name}_planes_level_{level}"), "GB/s", &against, decode)?;
            bench.result(&format!("size_{name}_planes_level_{level}"), "of the plain", &against, sizes)?;
        }
    }
    Ok(())
}

/// The encoder and the decoder of a codec, and their last output.
struct Measured {
    encoder: Encoder,
    decoder: Decoder,
    encoded: Vec<Vec<u8>>,
    chunk: Vec<u8>,
}

impl Measured {
    fn new(level: i32) -> anyhow::Result<Self> {
        let (encoder, decoder) = (Encoder::with_level(level)?, Decoder::new()?);
        Ok(Self { encoder, decoder, encoded: Vec::new(), chunk: vec![0; CHUNK_BYTES] })
    }

    /// Returns GB/s of plain bytes, and the encoded size.
    fn encode(&mut self, codec: Codec, bytes: &[u8]) -> anyhow::Result<(f64, usize)> {
        self.encoded.resize(bytes.len().div_ceil(CHUNK_BYTES), Vec::new());
        let started = Instant::now();
        for (chunk, out) in bytes.chunks(CHUNK_BYTES).zip(&mut self.encoded) {
            self.encoder.encode(codec, chunk, out)?;
        }
        let rate = memory::rate(bytes.len(), started) / 1e9;
        Ok((rate, self.encoded.iter().map(Vec::len).sum()))
    }

    /// Returns GB/s of plain bytes.
    fn decode(&mut self, bytes: &[u8]) -> anyhow::Result<f64> {
        let mut spent = std::time::Duration::ZERO;
        for (plain, encoded) in bytes.chunks(CHUNK_BYTES).zip(&self.encoded) {
            let started = Instant::now();
            self.decoder.decode(encoded, &mut self.chunk[..plain.len()])?;
            spent += started.elapsed();
            anyhow::ensure!(self.chunk[..plain.len()] == *plain, "a chunk came back otherwise");
        }
        Ok(bytes.len() as f64 / spent.as_secs_f64() / 1e9)
    }
}

/// Makes tensors. Weights as they are initialised and stay near: normal, deviation 0.02. Adam's first moment: normal, each row of 4096 with
/// a scale of its own. Adam's second moment: squares of the first, smoothed over time.
fn tensors(size_bytes: usize) -> Vec<(&'static str, Vec<u8>)> {
    let count = size_bytes / 4;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let weights: Vec<f32> = (0..count).map(|_| random.normal() * 0.02).collect();
    let mut first = Vec::with_capacity(count);
    let mut second = Vec::with_capacity(count);
    let mut scale = 1.0;
    for index in 0..count {
        if index % 4096 == 0 {
            scale = (random.normal() * 1.5 - 11.0).exp();
        }
        let gradient = random.normal() * scale;
        first.push(gradient * 0.3);
        let smooth = (0..4).map(|_| random.normal().powi(2)).sum::<f32>() / 4.0;
        second.push(scale * scale * smooth);
    }
    let bf16 = |values: &[f32]| values.iter().flat_map(|value| round_to_bf16(*value).to_le_bytes()).collect();
    let fp32 = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    vec![
        ("bf16_weights", bf16(&weights)),
        ("fp32_weights", fp32(&weights)),
        ("fp32_adam_first", fp32(&first)),
        ("fp32_adam_second", fp32(&second)),
        ("bf16_adam_first", bf16(&first)),
    ]
}

/// Rounds to nearest, ties to even.
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let [_, _, low, high] = rounded.to_le_bytes();
    u16::from_le_bytes([low, high])
}

struct Random(u64);

impl Random {
    /// Returns a uniform value above 0, up to 1.
    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 40) as f32 + 1.0) / 16_777_216.0
    }

    /// Returns a normal value, by Box and Muller.
    fn normal(&mut self) -> f32 {
        let (radius, angle) = (self.uniform(), self.uniform());
        (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
    }
}
