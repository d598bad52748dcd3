//! What does a job that calls torch.save and torch.load see?
//!
//! Owns: the three calls on the mount and on the baseline, timed inside one Python process. Does not own: the timing (python/torch_io.py).

use anyhow::Context;
use serde_json::Value;
use tidemark_benches::compare::{Compared, Sampled};
use tidemark_benches::{Bench, Mount, python};

/// Size of the state that is saved: two billion bytes in a full run.
const FULL_BYTES: u64 = 2_000_000_000;

/// Settings for saves under one name. If every version were kept, ten rounds would take 60 GB of disk.
const CONFIG: &str = "[retention]\nkeep_last = 2\n";

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    // The daemon's Tier-1 follows from this size, too. A Tier-1 of 12 GiB, the states that Python holds and the file in /dev/shm leave
    // little free memory on a machine of 24 GiB, and loads take fresh memory.
    let size_bytes = bench.options.size_bytes.min(FULL_BYTES);
    bench.options.size_bytes = size_bytes;
    bench.say(&format!("state: {size_bytes} bytes"))?;
    let mount = Mount::open_with(&bench.options, Some(CONFIG))?;
    let arguments = [
        mount.path().display().to_string(),
        bench.options.baseline.display().to_string(),
        size_bytes.to_string(),
        bench.options.rounds.to_string(),
    ];
    let answer = python::run("torch_io.py", &arguments)?;
    mount.close()?;
    let gigabytes = size_bytes as f64 / 1e9;
    for operation in ["save", "load", "load_sealing", "load_draining"] {
        // As rates, so that a ratio above 1 is better, as everywhere.
        let rates = |place| {
            let seconds = seconds(&answer, operation, place)?;
            Sampled::median(seconds.iter().map(|seconds| gigabytes / seconds).collect())
        };
        let rates = Compared::new(rates("mount")?, rates("baseline")?);
        bench.result(&format!("torch_{operation}"), "GB/s", &against(&bench, operation), rates)?;
    }
    for beside in ["", "_sealing", "_draining"] {
        let ms = |place| {
            let seconds = seconds(&answer, &format!("mmap{beside}"), place)?;
            Ok::<_, anyhow::Error>(Sampled::median(seconds)?.times(1e3))
        };
        let ms = Compared::new(ms("mount")?, ms("baseline")?);
        bench.result(&format!("torch_load_mmap_first_tensor{beside}"), "ms", &against(&bench, beside), ms)?;
    }
    // The two are measured one after the other in each round.
    let (sink, memcpy) = (seconds(&answer, "sink", "baseline")?, seconds(&answer, "memcpy", "baseline")?);
    let least =
        sink.iter().zip(&memcpy).map(|(sink_s, memcpy_s)| 1.3_f64.mul_add(*memcpy_s, *sink_s)).collect();
    let saves = Compared::new(Sampled::median(seconds(&answer, "save", "mount")?)?, Sampled::median(least)?);
    bench.result(
        "torch_save_against_sink_and_copy",
        "s",
        "torch.save into a sink that drops bytes, plus 1.3 × memcpy",
        saves,
    )
}

/// Names the baseline of an operation, which does the same work.
fn against(bench: &Bench, operation: &str) -> String {
    let folder = bench.baseline_folder();
    let beside = operation.ends_with("_sealing") || operation.ends_with("_draining");
    if beside { format!("{folder}, beside the same work") } else { folder }
}

/// Returns the seconds of one operation in one place, in the order in which they were taken. Operations without a place, `sink` and
/// `memcpy`, are in "baseline".
fn seconds(answer: &Value, operation: &str, place: &str) -> anyhow::Result<Vec<f64>> {
    let samples = answer.get(operation).and_then(|places| places.get(place)).and_then(Value::as_array);
    let samples = samples.with_context(|| format!("torch_io.py gave no {operation} for {place}"))?;
    Ok(samples.iter().filter_map(Value::as_f64).collect())
}
