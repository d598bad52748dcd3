//! How fast is the first open and read of a file after the daemon came back without it in memory?
//!
//! Owns: fetch from a local Tier-3, verify and read, against a read from the baseline. Does not own: the
//! restart's own time.

use anyhow::ensure;
use tidemark_benches::{Bench, Mount, files};

fn main() -> anyhow::Result<()> {
    let bench = Bench::start("restore")?;
    ensure!(bench.options.path.is_none(), "restore starts its own daemon: leave --path out");
    let mut mount = Mount::start(&bench.options, None)?;
    let (ours, theirs) =
        (mount.path().join("bench-restore"), bench.options.baseline.join("tidemark-bench-restore"));
    let size_bytes = bench.options.size_bytes;
    files::write_new(&ours, size_bytes)?;
    files::write_new(&theirs, size_bytes)?;
    mount.flush()?;
    let medians = bench.alternate(
        || {
            // A daemon that ends takes its Tier-1 along, so the next one has to fetch.
            mount.restart()?;
            Ok(files::read(&ours, size_bytes)? / 1e9)
        },
        || Ok(files::read(&theirs, size_bytes)? / 1e9),
    )?;
    files::remove(&theirs)?;
    mount.close()?;
    bench.result("restore_cold", "GB/s", medians)
}
