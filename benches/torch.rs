//! What does a job that calls torch.save and torch.load see?
//!
//! Owns: the three calls on the mount and on the baseline, timed inside one Python process. Does not own: how
//! they are timed (python/torch_io.py).

use anyhow::Context;
use serde_json::Value;
use tidemark_benches::compare::{Medians, median};
use tidemark_benches::{Bench, Mount, python};

/// The state that is saved: two billion bytes in a full run.
const FULL_BYTES: u64 = 2_000_000_000;

fn main() -> anyhow::Result<()> {
    let mut bench = Bench::start("torch")?;
    // Also what the daemon's Tier-1 is sized by: one of 12 GiB, the states that Python holds and the file in /dev/shm leave a
    // machine of 24 GiB little that is free, and loads take fresh memory.
    let size_bytes = bench.options.size_bytes.min(FULL_BYTES);
    bench.options.size_bytes = size_bytes;
    bench.say(&format!("state: {size_bytes} bytes"))?;
    let mount = Mount::open(&bench.options)?;
    let arguments = [
        mount.path().display().to_string(),
        bench.options.baseline.display().to_string(),
        size_bytes.to_string(),
        bench.options.rounds.to_string(),
    ];
    let answer = python::run("torch_io.py", &arguments)?;
    mount.close()?;
    for operation in ["save", "load", "load_sealing", "load_draining"] {
        // As rates, so that above 1 is better, as everywhere.
        let medians = medians(&answer, operation)?;
        let gigabytes = size_bytes as f64 / 1e9;
        let rates = Medians { value: gigabytes / medians.value, baseline: gigabytes / medians.baseline };
        bench.result(&format!("torch_{operation}"), "GB/s", rates)?;
    }
    for beside in ["", "_sealing", "_draining"] {
        let first = medians(&answer, &format!("mmap{beside}"))?;
        let ms = Medians { value: first.value * 1e3, baseline: first.baseline * 1e3 };
        bench.result(&format!("torch_load_mmap_first_tensor{beside}"), "ms", ms)?;
    }
    let (sink_s, memcpy_s) = (seconds(&answer, "sink", "baseline")?, seconds(&answer, "memcpy", "baseline")?);
    let save_s = seconds(&answer, "save", "mount")?;
    bench.result(
        "torch_save_against_sink_and_copy",
        "s",
        Medians { value: save_s, baseline: 1.3_f64.mul_add(memcpy_s, sink_s) },
    )
}

/// The medians of one operation's seconds in both places.
fn medians(answer: &Value, operation: &str) -> anyhow::Result<Medians> {
    Ok(Medians {
        value: seconds(answer, operation, "mount")?,
        baseline: seconds(answer, operation, "baseline")?,
    })
}

/// The median of one operation's seconds in one place; what has to do with no place, `sink` and `memcpy`, is in "baseline".
fn seconds(answer: &Value, operation: &str, place: &str) -> anyhow::Result<f64> {
    let samples = answer.get(operation).and_then(|places| places.get(place)).and_then(Value::as_array);
    let samples = samples.with_context(|| format!("torch_io.py gave no {operation} for {place}"))?;
    median(&mut samples.iter().filter_map(Value::as_f64).collect::<Vec<_>>())
}
