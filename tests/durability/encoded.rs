//! Checkpoints that are encoded for Tier-3: smaller there, the same bytes back, and damage found.
//!
//! Owns: real daemons with `[compression]`, over a directory and a bucket. Does not own: the codecs (the kernels crate),
//! what a manifest may say (protocol), what object stores answer (suite s3).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::s3::{S3Options, S3Server};

use crate::site::{
    CHUNK_BYTES, CONFIG, MIB, assert_holds, chunk_sum, flip, noise, object_path, options, save, start,
};

const PATH: &str = "run/step1.pt";
/// A file of a run with settings of its own.
const PLAIN: &str = "plain/step1.pt";
/// Size of a file of three chunks, the last one short and of an odd length.
const FILE_BYTES: usize = 20 * MIB + 7;
/// Largest share of BF16 bytes after encoding. The exponents carry little information, and encoding them saves nearly a
/// third.
const BF16_RATIO_MAX: f64 = 0.75;

fn config(codec: &str) -> String {
    format!("{CONFIG}[compression]\ncodec = \"{codec}\"\n[compression.runs.\"plain\"]\ncodec = \"none\"\n")
}

/// Returns bytes as torch.save writes a BF16 model: a few bytes outside tensors, then weights, nearly normal.
fn checkpoint(seed: u64, size_bytes: usize) -> Vec<u8> {
    let mut bytes = b"archive/data.pkl PK\x03\x04".repeat(16);
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    let random = noise(seed, 3 * size_bytes);
    let weight = |dice: &[u8]| {
        let sum: f32 = dice.iter().map(|die| f32::from(*die)).sum();
        ((sum - 765.0) / 181.0 * 0.02).to_bits() >> 16
    };
    bytes.extend(random.chunks_exact(6).flat_map(|dice| u16::try_from(weight(dice)).unwrap().to_le_bytes()));
    bytes.resize(size_bytes, 0xee);
    bytes
}

/// Reads the manifest that commits a checkpoint, below a directory.
fn manifest(tier3: &Path, checkpoint: &str) -> Value {
    let folder = tier3.join(checkpoint).join("v0.1");
    let marker: Value = serde_json::from_slice(&fs::read(folder.join("_COMMITTED")).unwrap()).unwrap();
    let key = marker["manifest"].as_str().expect("a commit names its manifest");
    serde_json::from_slice(&fs::read(tier3.join(key)).unwrap()).unwrap()
}

fn lengths(manifest: &Value) -> Vec<u64> {
    let lengths = manifest["files"][0]["encoding"]["lengths"].as_array().expect("it is encoded");
    lengths.iter().map(|length| length.as_u64().unwrap()).collect()
}

fn object_bytes(path: &PathBuf) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let bytes = fs::metadata(path).unwrap().size() as f64;
    bytes
}

#[test]
fn an_encoded_checkpoint_is_smaller_in_tier3_and_comes_back_bit_for_bit() {
    for codec in ["zstd", "planes"] {
        let Some(mut daemon) = start(options("256MiB", &config(codec))) else { return };
        let (bytes, loud) = (checkpoint(1, FILE_BYTES), noise(2, FILE_BYTES));
        save(&daemon, PATH, &bytes);
        save(&daemon, "run/step2.pt", &loud);
        save(&daemon, PLAIN, &bytes);
        daemon.flush();
        let tier3 = daemon.tier3_dir();
        let said = manifest(&tier3, PATH);
        assert_eq!((&said["format"], &said["files"][0]["encoding"]["codec"]), (&2.into(), &codec.into()));
        let object = object_path(&daemon, &tier3, PATH);
        let ratio = object_bytes(&object) / bytes.len() as f64;
        println!("{codec}: {ratio:.3} of a BF16 checkpoint");
        let most = if codec == "planes" { BF16_RATIO_MAX } else { 0.97 };
        assert!(ratio < most, "{codec}: {ratio}");
        assert_eq!(lengths(&said).iter().sum::<u64>(), fs::metadata(&object).unwrap().size());
        // A file that does not shrink, and a run without a codec, are written as before.
        for (path, content) in [("run/step2.pt", &loud), (PLAIN, &bytes)] {
            let plain = manifest(&tier3, path);
            assert_eq!(plain["format"], 1);
            assert!(plain["files"][0].get("encoding").is_none(), "{plain:#}");
            assert!(fs::read(object_path(&daemon, &tier3, path)).unwrap() == *content, "{path}");
        }
        for (metric, least) in
            [("tidemark_encode_in_bytes_total", bytes.len()), ("tidemark_encode_out_bytes_total", 1)]
        {
            assert!(daemon.metric(metric, &[]) >= least as f64, "{metric}");
        }
        for arguments in [&["verify"][..], &["verify", "--deep"]] {
            let output = daemon.ctl(arguments);
            assert!(output.status.success(), "{}", shown(&output));
        }
        // After this, only Tier-3 has the files.
        daemon.stop();
        daemon.start_again();
        for (path, content) in [(PATH, &bytes), ("run/step2.pt", &loud), (PLAIN, &bytes)] {
            assert_holds(&daemon, path, content, "restored");
        }
        // The daemon heals the host copy from the encoded object too.
        crate::site::flip_host(&daemon, PATH, 12_345);
        let output = daemon.ctl(&["verify", "--deep"]);
        assert!(output.status.success(), "{}", shown(&output));
        assert_holds(&daemon, PATH, &bytes, "healed");
    }
}

#[test]
fn a_daemon_that_takes_over_knows_where_encoded_chunks_lie() {
    let Some(mut daemon) = start(options("64MiB", &config("planes"))) else { return };
    let first = checkpoint(3, FILE_BYTES);
    save(&daemon, PATH, &first);
    daemon.flush();
    // Enough saves pass through a Tier-1 of 64 MiB that the first one is evicted.
    for step in 2..6 {
        save(&daemon, &format!("run/step{step}.pt"), &noise(step, FILE_BYTES));
        daemon.flush();
    }
    let host = &crate::site::shown_file(&daemon, PATH)["host_path"];
    assert!(host.is_null(), "it is cold: {host}");
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    daemon.wait_served_again(std::time::Duration::from_secs(60));
    assert_holds(&daemon, PATH, &first, "read by the next daemon, which has the journal only");
}

#[test]
fn a_flipped_byte_in_an_encoded_chunk_is_named_and_never_served() {
    let Some(mut daemon) = start(options("256MiB", &config("planes"))) else { return };
    let bytes = checkpoint(4, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    save(&daemon, "run/step2.pt", &bytes);
    daemon.flush();
    let tier3 = daemon.tier3_dir();
    let chunks = lengths(&manifest(&tier3, PATH));
    // The damages hit a mantissa's byte, and the first byte of a chunk, which names its encoding.
    let damages = [(PATH, chunks[0] + 1000), ("run/step2.pt", chunks[0])];
    for (path, offset) in damages {
        flip(&object_path(&daemon, &tier3, path), offset);
    }
    daemon.stop();
    daemon.start_again();
    for (path, _) in damages {
        let read = fs::read(daemon.mount().join(path));
        assert_eq!(read.map(|bytes| bytes.len()).unwrap_err().raw_os_error(), Some(libc::EIO), "{path}");
        let named = daemon.log().lines().any(|line| line.contains(path) && line.contains("chunk 1"));
        assert!(named, "{}", daemon.log_tail());
    }
    assert!(daemon.log().contains(&chunk_sum(&bytes, 1)), "the checksum is of the file's bytes");
    let output = daemon.ctl(&["verify", "--deep", "-o", "json"]);
    assert_eq!(output.status.code(), Some(4), "{}", shown(&output));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lost: Vec<_> = answer["unrecoverable"].as_array().unwrap().iter().map(|file| &file["path"]).collect();
    assert_eq!(lost, [PATH, "run/step2.pt"], "{answer:#}");
}

#[test]
fn a_bucket_holds_encoded_chunks_in_parts_and_gives_them_back() {
    if !tidemark_tests::machine::can_mount() {
        return;
    }
    let server = S3Server::start(S3Options::default()).expect("a server");
    let options = DaemonOptions {
        tier1: "256MiB".into(),
        tier3: Some(server.url("p")),
        config: Some(config("planes")),
        env: server.env(),
        ..DaemonOptions::default()
    };
    let mut daemon = Daemon::start(options);
    // The encoded file has more than one part, and no part ends where a chunk does.
    let bytes = checkpoint(5, 5 * CHUNK_BYTES + 3);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let (took, went) = (
        daemon.metric("tidemark_encode_in_bytes_total", &[]),
        daemon.metric("tidemark_encode_out_bytes_total", &[]),
    );
    assert!(went > 2.0 * CHUNK_BYTES as f64 && went < BF16_RATIO_MAX * took, "{went} of {took}");
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, PATH, &bytes, "restored from the bucket");
    let output = daemon.ctl(&["verify", "--deep"]);
    assert!(output.status.success(), "{}", shown(&output));
}
