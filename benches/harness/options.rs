//! The options of a bench, which follow its name on the command line.
//!
//! Owns: parsing them, and the sizes of a full and of a smoke run. Does not own: the choice of the bench (`stages`), the use of its
//! options.

use anyhow::{Context, bail};
use std::path::PathBuf;

/// Size of a full run: so large that neither a cache nor a first burst of ready memory decides.
const FULL_SIZE_BYTES: u64 = 4 << 30;
const FULL_ROUNDS: usize = 10;
/// Size of a smoke run, which tests whether the bench works, not how fast anything is.
const SMOKE_SIZE_BYTES: u64 = 8 << 20;
const SMOKE_ROUNDS: usize = 1;

/// Options: `--path DIR` (a mounted Tidemark; a daemon is started without it), `--baseline DIR` (default /dev/shm), `--size BYTES`,
/// `--tier1 BYTES` (of a daemon that is started; several times the size without it), `--rounds N` (an odd number is rounded up), `--saves
/// N` (of a stage that saves many times), `--smoke` (or TIDEMARK_BENCH_SMOKE=1).
#[derive(Clone, Debug)]
pub struct Options {
    pub path: Option<PathBuf>,
    pub baseline: PathBuf,
    pub size_bytes: u64,
    /// Whether the caller chose the size.
    pub size_given: bool,
    pub tier1_bytes: Option<u64>,
    /// Number of rounds, even, so that each of two things is first in as many rounds. If being first costs something, the median of an odd
    /// number of rounds would be that of firsts for one thing and that of seconds for the other.
    pub rounds: usize,
    pub saves: Option<usize>,
    pub smoke: bool,
}

impl Options {
    /// Reads the arguments after the bench's name, and TIDEMARK_BENCH_SMOKE.
    ///
    /// # Errors
    /// An unknown option, or a value that is missing, zero or no number.
    pub fn from_arguments(arguments: &[String]) -> anyhow::Result<Self> {
        let smoke_wanted = std::env::var_os("TIDEMARK_BENCH_SMOKE").is_some_and(|value| value == "1");
        Self::parse(arguments.iter().cloned(), smoke_wanted)
    }

    fn parse(arguments: impl Iterator<Item = String>, mut smoke: bool) -> anyhow::Result<Self> {
        let (mut path, mut baseline, mut size_bytes, mut tier1_bytes, mut rounds, mut saves) =
            (None, None, None, None, None, None);
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--path" => path = Some(PathBuf::from(value()?)),
                "--baseline" => baseline = Some(PathBuf::from(value()?)),
                "--size" => size_bytes = Some(positive(&argument, &value()?)?),
                "--tier1" => tier1_bytes = Some(positive(&argument, &value()?)?),
                "--rounds" => rounds = Some(usize::try_from(positive(&argument, &value()?)?)?),
                "--saves" => saves = Some(usize::try_from(positive(&argument, &value()?)?)?),
                "--smoke" => smoke = true,
                // `cargo bench` adds this by itself.
                "--bench" => {}
                _ => bail!(
                    "unknown option {argument}; known: --path --baseline --size --tier1 --rounds --saves --smoke"
                ),
            }
        }
        Ok(Self {
            path,
            baseline: baseline.unwrap_or_else(|| PathBuf::from("/dev/shm")),
            size_given: size_bytes.is_some(),
            size_bytes: size_bytes.unwrap_or(if smoke { SMOKE_SIZE_BYTES } else { FULL_SIZE_BYTES }),
            tier1_bytes,
            saves,
            rounds: rounds.map_or(if smoke { SMOKE_ROUNDS } else { FULL_ROUNDS }, |rounds| {
                // The thing that is measured first in one round is second in the next.
                rounds.next_multiple_of(2)
            }),
            smoke,
        })
    }
}

fn positive(option: &str, text: &str) -> anyhow::Result<u64> {
    match text.parse() {
        Ok(0) => bail!("{option} must be at least 1, not 0"),
        Ok(number) => Ok(number),
        Err(error) => Err(error).with_context(|| format!("{option} needs a whole number, not {text:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> anyhow::Result<Options> {
        Options::parse(arguments.iter().map(ToString::to_string), false)
    }

    #[test]
    fn sizes_given_win_over_smoke() {
        let options = parse(&["--bench", "--size", "4096", "--smoke"]).unwrap();
        assert_eq!((options.size_bytes, options.size_given, options.rounds), (4096, true, SMOKE_ROUNDS));
        assert!(!parse(&["--smoke"]).unwrap().size_given);
    }

    #[test]
    fn each_of_two_things_is_first_as_often_as_the_other() {
        assert_eq!(parse(&["--rounds", "3"]).unwrap().rounds, 4);
        assert_eq!(parse(&["--rounds", "4"]).unwrap().rounds, 4);
        assert_eq!(parse(&[]).unwrap().rounds % 2, 0);
    }

    #[test]
    fn a_wrong_option_is_refused() {
        for wrong in
            [&["--sice", "1"][..], &["--size"], &["--tier1", "0"], &["--rounds", "0"], &["--size", "4GiB"]]
        {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
