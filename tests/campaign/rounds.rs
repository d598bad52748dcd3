//! A campaign from its start to its report: work, kill, compare, over and over.
//!
//! Owns: the order of the steps and the moment of each kill. Does not own: the promises (`claims`), the trainers
//! (`crew`), the demands on the figures (`report`).

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tidemark_tests::campaign::now_ns;
use tidemark_tests::campaign::page::{Act, Doing};
use tidemark_tests::daemon::{Daemon, is_mounted, shown};
use tidemark_tests::process;

use crate::crew::Crew;
use crate::plan::{Kill, Plan, Round};
use crate::report::{Report, counts};
use crate::site::{TIER3_BYTES_MAX, bytes_below, options, tier3_dir, warm, within_limit};
use crate::watch::{IDLE_GAUGES, Watch, descriptors};

/// Longest wait of a kill for a write, an open and a rename at the same time.
const AIM_LIMIT: Duration = Duration::from_secs(3);
/// Interval of the checks for that moment, short against each of those calls.
const AIM_EVERY: Duration = Duration::from_micros(20);
/// Limit of a restart, which only ends a campaign that hangs. The project's goal is well below a second.
const SERVED_AGAIN_LIMIT: Duration = Duration::from_secs(60);
/// Limit of a comparison, which reads some hundred MiB. A call that hangs ends the campaign.
const AUDIT_LIMIT: Duration = Duration::from_secs(240);
/// Limit of the node's last work after everything was removed.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// Limit of an end. A killed process is gone only after its memory was freed.
const DEATH_LIMIT: Duration = Duration::from_secs(30);
/// Settings that a person may choose.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) time: Duration,
    pub(crate) seed: u64,
    pub(crate) daemon_kills: bool,
}

/// Runs a campaign. Panics at the first broken promise, and names it.
pub(crate) fn run(settings: &Settings) -> Report {
    let mut campaign = Campaign::start(settings);
    let began = Instant::now();
    let mut plan = Plan::new(settings.seed, Crew::seats(), settings.daemon_kills);
    while began.elapsed() < settings.time || !plan.is_whole() {
        campaign.report.rounds += 1;
        let round = plan.next_round();
        campaign.round(&round);
    }
    campaign.end();
    let mut report = campaign.report;
    report.seconds = began.elapsed().as_secs_f64();
    report
}

struct Campaign {
    // The first field is dropped first, so that trainers are killed before their mount goes.
    crew: Crew,
    watch: Watch,
    daemon: Daemon,
    tier3: TempDir,
    pages: PathBuf,
    lives: u64,
    report: Report,
}

impl Campaign {
    fn start(settings: &Settings) -> Self {
        let tier3 = tier3_dir();
        let daemon = Daemon::start(options(tier3.path()));
        daemon.assert_passthrough();
        let pages = daemon.scratch("pages");
        let mut crew = Crew::new(daemon.mount(), &pages, settings.seed);
        let mut report = Report::new(settings.seed, settings.daemon_kills);
        warm(&daemon);
        report.rest.descriptors_at_start = descriptors(&daemon);
        report.rest.tier1_used_bytes_at_start = daemon.metric("tidemark_tier1_used_bytes", &[]);
        crew.begin("node-1".into(), &pages);
        Self { crew, watch: Watch::start(&daemon), daemon, tier3, pages, lives: 1, report }
    }

    fn round(&mut self, round: &Round) {
        std::thread::sleep(round.work);
        if !(round.while_away && round.kill == Kill::Daemon) {
            self.strike_trainers(round);
            self.bury_trainers(round);
        }
        match round.kill {
            Kill::Nobody => {}
            Kill::Daemon => self.kill_daemon(round),
            Kill::Keeper | Kill::Node => return self.kill_node(round),
        }
        self.stand_still(round);
        self.audit(round);
        if round.flush {
            self.flush(round);
        }
        for folder in self.crew.outdated_folders() {
            self.remove(&folder);
        }
        self.crew.fill(&self.pages);
        self.crew.go_on();
    }

    fn strike_trainers(&mut self, round: &Round) {
        for seat in &round.trainers {
            let doing = self.crew.strike(*seat);
            self.report.kills.entry("trainer").or_default().injected(false, doing.as_slice());
        }
    }

    fn bury_trainers(&mut self, round: &Round) {
        for seat in &round.trainers {
            self.crew.bury(*seat);
        }
    }

    /// Kills the serving daemon alone. No trainer may notice more than a wait.
    fn kill_daemon(&mut self, round: &Round) {
        let pid = self.daemon.ready().pid;
        let killed = Instant::now();
        let unanswered = self.shoot(round, || process::signal(pid, Signal::KILL));
        self.report.kills.entry("daemon").or_default().injected(round.aimed, &unanswered);
        if round.while_away {
            self.strike_trainers(round);
        }
        self.daemon.wait_served_again(SERVED_AGAIN_LIMIT);
        let outage_ms = killed.elapsed().as_secs_f64() * 1000.0;
        self.report.longest_outage_ms = self.report.longest_outage_ms.max(outage_ms);
        if round.while_away {
            self.bury_trainers(round);
        }
        self.watch.follow(&self.daemon);
    }

    /// Kills the keeper, or keeper and daemon, and with them mount and memory. After a start with nothing but Tier-3,
    /// committed files must be there.
    fn kill_node(&mut self, round: &Round) {
        let keeper = self.daemon.keeper_pid();
        let what = if round.kill == Kill::Keeper { "keeper" } else { "node" };
        self.broken(round, self.crew.failures_before(u64::MAX));
        let before_ns = now_ns();
        let unanswered = self.shoot(round, || match round.kill {
            Kill::Keeper => process::signal(keeper, Signal::KILL),
            Kill::Node | Kill::Daemon | Kill::Nobody => drop(process::kill_node(keeper)),
        });
        self.report.kills.entry(what).or_default().injected(round.aimed, &unanswered);
        if round.kill == Kill::Keeper {
            let mount = self.daemon.mount().to_owned();
            let gone = within_limit(DEATH_LIMIT, move || {
                while is_mounted(&mount) && fs::metadata(&mount).is_ok() {
                    std::thread::sleep(process::POLL);
                }
                Ok(())
            });
            self.broken(round, gone.map_err(|_| "the mount outlived its keeper".into()));
        }
        self.crew.kill_all();
        self.daemon.kill9();
        self.broken(round, self.crew.failures_before(before_ns));
        self.start_again();
        self.audit_restart(round);
        let old = std::mem::take(&mut self.crew.top);
        self.remove(&old);
        if bytes_below(self.tier3.path()) > TIER3_BYTES_MAX {
            self.begin_tier3_anew();
        }
        self.lives += 1;
        self.crew.go_on();
        self.crew.begin(format!("node-{}", self.lives), &self.pages);
    }

    /// Waits for the moment, kills, and returns the calls that had begun before and were unanswered after.
    fn shoot(&self, round: &Round, kill: impl FnOnce()) -> Vec<Doing> {
        let deadline = Instant::now() + AIM_LIMIT;
        while round.aimed && Instant::now() < deadline {
            let acts: BTreeSet<Act> = self.crew.doing().flatten().map(|doing| doing.act).collect();
            if counts(&acts) {
                break;
            }
            std::thread::sleep(AIM_EVERY);
        }
        let at_ns = now_ns();
        kill();
        self.crew.doing().flatten().filter(|doing| doing.since_ns < at_ns).collect()
    }

    fn stand_still(&mut self, round: &Round) {
        let paused = self.crew.pause();
        self.broken(round, paused);
        self.broken(round, self.crew.failures_before(u64::MAX));
    }

    fn audit(&self, round: &Round) {
        let (book, mount) = (self.crew.shared_book(), self.daemon.mount().to_owned());
        let kept = within_limit(AUDIT_LIMIT, move || {
            let mut book = book.lock().expect("nobody panics with the book in hand");
            let kept = book.claims.audit(&mount);
            book.claims.forget_absent();
            kept
        });
        self.broken(round, kept);
    }

    fn audit_restart(&self, round: &Round) {
        let (book, mount) = (self.crew.shared_book(), self.daemon.mount().to_owned());
        let kept = within_limit(AUDIT_LIMIT, move || {
            book.lock().expect("nobody panics with the book in hand").claims.audit_restart(&mount)
        });
        self.broken(round, kept);
    }

    /// Runs `flush --wait`, and records which names it reports as committed.
    fn flush(&mut self, round: &Round) {
        let output = self.daemon.ctl(&["flush", "--wait", "--timeout", "120", "-o", "json"]);
        let flush: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("flush printed no JSON ({error}): {}", shown(&output)));
        let rows = flush["pending"].as_array().unwrap_or_else(|| panic!("no list in {flush:#}"));
        assert_eq!(output.status.code(), Some(i32::from(!rows.is_empty())), "{}", shown(&output));
        // Since trainers are paused and Tier-3 is in reach, only saves that a kill cut short may be pending.
        for row in rows {
            assert!(
                row["reason"] == "torn" || row["reason"] == "incomplete",
                "flush --wait ended with something to do: {row:#}\n{}",
                self.daemon.log_tail()
            );
        }
        let pending: Vec<String> =
            rows.iter().filter_map(|row| row["path"].as_str().map(str::to_owned)).collect();
        let excused = self.crew.book().claims.committed(&pending);
        self.broken(round, excused);
        self.report.flushes += 1;
    }

    /// Removes a folder in which no trainer works.
    fn remove(&self, folder: &str) {
        let place = self.daemon.mount().join(folder);
        match fs::remove_dir_all(&place) {
            Ok(()) => {}
            // If nothing in the folder was committed, it is not there after a restart.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => panic!("removing {}: {error}\n{}", place.display(), self.daemon.log_tail()),
        }
        self.crew.book().claims.removed(folder);
    }

    fn start_again(&mut self) {
        self.daemon.start_again();
        self.daemon.assert_passthrough();
        self.watch.follow(&self.daemon);
    }

    fn begin_tier3_anew(&mut self) {
        self.daemon.stop_with_status();
        fs::remove_dir_all(self.tier3.path()).expect("removing Tier-3");
        fs::create_dir(self.tier3.path()).expect("making Tier-3");
        self.start_again();
    }

    /// Ends all trainers, commits and removes everything, and compares once more with empty memory.
    fn end(&mut self) {
        let last = Round {
            work: Duration::ZERO,
            kill: Kill::Nobody,
            aimed: false,
            trainers: vec![],
            while_away: false,
            flush: true,
        };
        std::thread::sleep(Duration::from_secs(1));
        self.stand_still(&last);
        self.crew.end_all();
        self.broken(&last, self.crew.failures_before(u64::MAX));
        self.audit(&last);
        self.flush(&last);
        let top = self.crew.top.clone();
        self.remove(&top);
        self.audit(&last);
        self.flush(&last);
        self.idle();
        self.report.tier1 = self.watch.tier1();
        self.daemon.stop();
        self.start_again();
        self.audit_restart(&last);
        self.report.promised = self.crew.book().claims.promised.clone();
        let figures = self.crew.figures().clone();
        self.report.calls_were(&figures);
        self.report.tier3_bytes = bytes_below(self.tier3.path());
        self.daemon.stop();
    }

    /// Records gauges and descriptors when all work is done, or after a limit. Waits because the daemon frees the memory of
    /// removed files bit by bit, with their descriptors open.
    fn idle(&mut self) {
        let (daemon, rest) = (&self.daemon, &mut self.report.rest);
        process::until(IDLE_LIMIT, || {
            rest.gauges =
                IDLE_GAUGES.iter().map(|gauge| ((*gauge).to_owned(), daemon.metric(gauge, &[]))).collect();
            rest.tier1_used_bytes = daemon.metric("tidemark_tier1_used_bytes", &[]);
            rest.descriptors = descriptors(daemon);
            (rest.gauges.values().all(|value| *value == 0.0) && rest.descriptors_are_back()).then_some(())
        });
    }

    fn broken(&self, round: &Round, result: Result<(), String>) {
        if let Err(what) = result {
            let (seed, number) = (self.report.seed, self.report.rounds);
            let events = shown(&self.daemon.ctl(&["events"]));
            panic!("seed {seed}, round {number}, {round:?}: {what}\n{events}\n{}", self.daemon.log_tail());
        }
    }
}
