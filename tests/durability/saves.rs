//! Unusual saves: over an old one, by more ranks than before, of an older step, by two jobs at once, and with an index that
//! lies.
//!
//! Owns: the newest checkpoint offered afterwards, and that no checkpoint mixes two saves. Does not own: the content of an index
//! (protocol, beside the code), frameworks themselves (suite frameworks).

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tidemark_tests::daemon::Daemon;
use tidemark_tests::process;

use crate::limits::anonymous_kib;
use crate::shield::Rank;
use crate::site::{CONFIG, MIB, assert_holds, names, noise, options, save, start};

const LIMIT: Duration = Duration::from_secs(20);
/// Several times the settle time.
const STAYS: Duration = Duration::from_millis(1500);

/// Returns a `.metadata` that lists these files with their sizes, as pickle protocol 2 writes it.
fn metadata(files: &[(&str, usize)]) -> Vec<u8> {
    let text =
        |text: &str| [&b"X"[..], &u32::try_from(text.len()).unwrap().to_le_bytes(), text.as_bytes()].concat();
    let mut pickle = b"\x80\x02".to_vec();
    for (name, size_bytes) in files {
        pickle.extend(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(");
        pickle.extend(
            [text("relative_path"), text(name), text("offset"), b"K\x00".to_vec(), text("length")].concat(),
        );
        pickle.extend([&b"J"[..], &u32::try_from(*size_bytes).unwrap().to_le_bytes(), b"ub"].concat());
    }
    pickle.push(b'.');
    pickle
}

fn shard(save: u64, rank: usize) -> Vec<u8> {
    noise(save * 100 + rank as u64, MIB + rank)
}

fn shard_name(rank: usize) -> String {
    format!("__{rank}_0.distcp")
}

/// Returns the index that rank 0 writes last.
fn index(ranks: usize) -> Vec<u8> {
    let names: Vec<_> = (0..ranks).map(shard_name).collect();
    metadata(&names.iter().enumerate().map(|(rank, name)| (name.as_str(), MIB + rank)).collect::<Vec<_>>())
}

/// Writes the files of a save beside the mount, for shells to copy.
fn prepare(daemon: &Daemon, save: u64, ranks: usize) -> std::path::PathBuf {
    let aside = daemon.scratch(&format!("save{save}"));
    for rank in 0..ranks {
        fs::write(aside.join(shard_name(rank)), shard(save, rank)).unwrap();
    }
    fs::write(aside.join(".metadata"), index(ranks)).unwrap();
    aside
}

fn holds(daemon: &Daemon, directory: &str, save: u64, ranks: usize) -> bool {
    let place = daemon.mount().join(directory);
    (0..ranks)
        .all(|rank| fs::read(place.join(shard_name(rank))).is_ok_and(|bytes| bytes == shard(save, rank)))
        && fs::read(place.join(".metadata")).is_ok_and(|bytes| bytes == index(ranks))
}

fn order(from: &Path, to: &str, name: &str, cut: bool) -> String {
    let (from, to) = (from.join(name).display().to_string(), format!("{to}/{name}"));
    match (cut, name) {
        (true, _) => format!("exec 3>{to}; head -c 20 {from} >&3"),
        // DCP writes its index in this way.
        (false, ".metadata") => format!("cat {from} >{to}.tmp; mv {to}.tmp {to}"),
        (false, _) => format!("cat {from} >{to}"),
    }
}

#[test]
fn a_save_over_an_old_one_that_is_cut_at_any_file_leaves_the_old_one_whole() {
    let Some(mut daemon) = start(options("512MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir_all(run.join("fixed")).unwrap();
    let save_to = |save: u64, cut: Option<usize>| {
        let aside = prepare(&daemon, save, 2);
        let mut rank = Rank::start(&run, Some(("29511", 0, 1)));
        for (index, name) in [shard_name(0), shard_name(1), ".metadata".to_owned()].iter().enumerate() {
            if cut == Some(index) && name == ".metadata" {
                rank.does(&format!(
                    "exec 3>fixed/.metadata.tmp; head -c 20 {}/.metadata >&3",
                    aside.display()
                ));
            } else {
                rank.does(&order(&aside, "fixed", name, cut == Some(index)));
            }
            if cut == Some(index) {
                return rank.kill();
            }
        }
        rank.kill();
    };
    save_to(1, None);
    daemon.flush();
    assert!(holds(&daemon, "run/fixed", 1, 2));
    for cut in 0..3 {
        save_to(10 + cut, Some(usize::try_from(cut).unwrap()));
        process::until(LIMIT, || holds(&daemon, "run/fixed", 1, 2).then_some(())).unwrap_or_else(|| {
            panic!(
                "cut at file {cut}: {:?} are not the old ones\n{}",
                names(&run.join("fixed")),
                daemon.log_tail()
            )
        });
        assert_eq!(daemon.checkpoint("run/fixed").unwrap()["version"], 1, "cut at file {cut}");
    }
    save_to(20, None);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert!(holds(&daemon, "run/fixed", 20, 2), "saved whole at last, and there after a restart");
}

/// The replacing directory's files are older than the replaced ones, but its version is newer.
#[test]
fn a_checkpoint_that_an_older_directory_replaces_is_its_own_newest_version() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    for (save_number, directory) in [(1, "aside/backup"), (2, "run/step1")] {
        save(&daemon, &format!("{directory}/model.safetensors"), &noise(save_number, MIB));
    }
    daemon.flush();
    let versions = |daemon: &Daemon| {
        let status = daemon.ctl_json(&["status"]);
        let mut runs = status["runs"].as_array().expect("a list").iter();
        let run = runs.find(|run| run["run"] == "run").expect("it has a checkpoint");
        let newest = daemon.wait_committed("run/step1", LIMIT)["version"].as_u64();
        (newest, run["watermark"]["version"].as_u64())
    };
    let (whole, watermark) = versions(&daemon);
    assert!(whole.is_some() && whole == watermark, "{whole:?} {watermark:?}");
    let at = |name: &str| daemon.mount().join(name);
    fs::remove_dir_all(at("run/step1")).unwrap();
    fs::rename(at("aside/backup"), at("run/step1")).unwrap();
    daemon.flush();
    let (rest, watermark) = versions(&daemon);
    assert!(rest > whole, "{rest:?} after {whole:?}: {:#?}", daemon.checkpoints());
    assert_eq!(rest, watermark, "{}", daemon.ctl_json(&["status"]));
    daemon.kill9();
    daemon.start_again();
    assert_eq!(versions(&daemon), (rest, rest), "as Tier-3 says it");
}

/// The four ranks of the last save prove nothing about a save by eight.
#[test]
fn a_world_that_grows_is_whole_only_with_all_its_ranks() {
    let Some(daemon) = start(options("512MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir_all(&run).unwrap();
    for (save, ranks) in [(1_u64, 4_usize), (2, 8)] {
        let aside = prepare(&daemon, save, ranks);
        let world = u32::try_from(ranks).unwrap();
        let mut shells: Vec<_> =
            (0..world).map(|rank| Rank::start(&run, Some(("29512", rank, world)))).collect();
        let place = format!("step-{save}");
        for (rank, shell) in shells.iter_mut().enumerate().rev() {
            if rank == 1 {
                // Rank 1 writes last, and the index follows.
                continue;
            }
            shell.does(&format!("mkdir -p {place}; {}", order(&aside, &place, &shard_name(rank), false)));
        }
        std::thread::sleep(STAYS);
        let row = daemon.checkpoint(&format!("run/{place}")).expect("it is listed");
        assert_ne!(row["state"], "committed", "{place} lacks rank 1 of {ranks}: {row:#}");
        shells[1].does(&order(&aside, &place, &shard_name(1), false));
        shells[0].does(&order(&aside, &place, ".metadata", false));
        daemon.wait_committed(&format!("run/{place}"), LIMIT);
        assert!(holds(&daemon, &format!("run/{place}"), save, ranks));
        shells.into_iter().for_each(Rank::kill);
    }
    assert_eq!(daemon.ctl_json(&["show", "run/step-2"])["checkpoint"]["files"], 9);
}

#[test]
fn of_two_jobs_in_one_run_the_one_that_is_killed_takes_nothing_from_the_other() {
    let Some(daemon) = start(options("512MiB", CONFIG)) else { return };
    let run = daemon.mount().join("run");
    fs::create_dir_all(&run).unwrap();
    let (one, other) = (prepare(&daemon, 1, 2), prepare(&daemon, 2, 2));
    let mut first = Rank::start(&run, Some(("29513", 0, 1)));
    let mut second = Rank::start(&run, Some(("29514", 0, 1)));
    first.does("mkdir step-10");
    second.does("mkdir step-20");
    first.does(&order(&one, "step-10", &shard_name(0), false));
    second.does(&order(&other, "step-20", &shard_name(0), false));
    second.does(&order(&other, "step-20", &shard_name(1), true));
    first.does(&order(&one, "step-10", &shard_name(1), false));
    second.kill();
    first.does(&order(&one, "step-10", ".metadata", false));
    daemon.wait_committed("run/step-10", LIMIT);
    let hidden = || (names(&run) == ["step-10"]).then_some(());
    process::until(LIMIT, hidden).unwrap_or_else(|| panic!("{:?}\n{}", names(&run), daemon.log_tail()));
    assert!(holds(&daemon, "run/step-10", 1, 2));
    assert_eq!(daemon.ctl_json(&["show", "run@latest"])["checkpoint"]["step"], 10);
    first.kill();
}

#[test]
fn a_step_that_goes_back_and_one_that_is_saved_twice_are_the_newest_when_they_are_committed() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let path = |step: u64| format!("run/step{step}.pt");
    for (step, seed, version) in [(10, 1, 1), (20, 2, 1), (5, 3, 1), (20, 4, 2)] {
        save(&daemon, &path(step), &noise(seed, 1000));
        daemon.flush();
        let latest = daemon.ctl_json(&["show", "run@latest"]);
        assert_eq!(
            (latest["checkpoint"]["step"].as_u64(), latest["checkpoint"]["version"].as_u64()),
            (Some(step), Some(version)),
            "{latest:#}"
        );
    }
    daemon.stop();
    daemon.start_again();
    for (step, seed) in [(10, 1), (20, 4), (5, 3)] {
        assert_holds(&daemon, &path(step), &noise(seed, 1000), "after a restart");
    }
    let latest = daemon.ctl_json(&["show", "run@latest"]);
    assert_eq!(
        (latest["checkpoint"]["step"].as_u64(), latest["checkpoint"]["version"].as_u64()),
        (Some(20), Some(2))
    );
}

/// Anonymous memory that the daemon may take at any moment, whatever its input.
const ANONYMOUS_KIB: u64 = 512 << 10;

/// The most anonymous memory that a process has while this value lives.
struct Peak {
    most_kib: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
    watcher: std::thread::JoinHandle<()>,
}

impl Peak {
    fn watch(pid: u32) -> Self {
        let (most_kib, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let shared = (Arc::clone(&most_kib), Arc::clone(&done));
        let watcher = std::thread::spawn(move || {
            while !shared.1.load(Relaxed) {
                shared.0.fetch_max(anonymous_kib(pid), Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Self { most_kib, done, watcher }
    }

    fn kib(self) -> u64 {
        self.done.store(true, Relaxed);
        self.watcher.join().unwrap();
        self.most_kib.load(Relaxed)
    }
}

/// The daemon reads indices as root, although any user with access to the mount may write them.
#[test]
fn an_index_that_is_hostile_proves_nothing_runs_nothing_and_costs_little() {
    let Some(daemon) = start(options("512MiB", CONFIG)) else { return };
    let ran = daemon.scratch("hostile").join("ran");
    let command = format!("touch {}", ran.display());
    let program = [
        &b"\x80\x02cposix\nsystem\nX"[..],
        &u32::try_from(command.len()).unwrap().to_le_bytes(),
        command.as_bytes(),
        b"\x85R.",
    ]
    .concat();
    let whole = metadata(&[("__0_0.distcp", MIB)]);
    let indices: [(&str, Vec<u8>); 8] = [
        ("program", program),
        ("cut", whole[..whole.len() - 5].to_vec()),
        ("absent", metadata(&[("__0_0.distcp", MIB), ("__1_0.distcp", MIB)])),
        ("longer", metadata(&[("__0_0.distcp", MIB + 1)])),
        ("traversal", metadata(&[("../../../etc/passwd", 1)])),
        ("stack-bomb", vec![b'}'; 48 * MIB]),
        ("memo-bomb", [&b"N"[..], &vec![0x94; 48 * MIB]].concat()),
        ("length-bomb", b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.".to_vec()),
    ];
    let peak = Peak::watch(daemon.ready().pid);
    for (name, index) in &indices {
        save(&daemon, &format!("run/{name}/__0_0.distcp"), &noise(1, MIB));
        save(&daemon, &format!("run/{name}/.metadata"), index);
    }
    // A good checkpoint comes last. Once it is committed, the daemon has had time for the hostile ones.
    save(&daemon, "run/good/__0_0.distcp", &noise(1, MIB));
    save(&daemon, "run/good/.metadata", &whole);
    daemon.wait_committed("run/good", LIMIT);
    std::thread::sleep(STAYS);
    for (name, _) in &indices {
        let row = daemon.checkpoint(&format!("run/{name}")).unwrap_or_else(|| panic!("{name} is not listed"));
        assert_ne!(row["state"], "committed", "{name}: {row:#}");
    }
    assert!(!ran.exists(), "the program in an index ran");
    let peak_kib = peak.kib();
    assert!(peak_kib < ANONYMOUS_KIB, "the daemon took {peak_kib} KiB");
}
