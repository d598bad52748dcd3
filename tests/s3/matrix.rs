//! Every request of a save, a retirement and a start, crossed with everything that may go wrong with it.
//!
//! Goal: a version ends committed and readable, or absent and then committed by the next try; no marker stands whose data
//! does not verify; no data is deleted that a marker names. Method: the engine's own code over real HTTP, one server a
//! cell; an auditor that reads the bucket itself, after the run with the fault and after the one without; a count that
//! proves that the fault took effect.

use super::cells::{self, Cell, Expected, Scene};
use super::save::{PREFIX, Sealer};
use super::scene::{Failure, Site, Then, read_back};
use futures::StreamExt;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_tests::s3::Fault;
use tidemark_tests::{audit, machine};

/// Cells that run at once. Most of a cell's time is waiting for requests that are never answered.
const CELLS_AT_ONCE: usize = 32;
/// Limit within which a start's background work reaches its fault, on a busy machine.
const FIRED_LIMIT: Duration = Duration::from_secs(30);
/// Tries without a fault: the same version again, and once the next one if the first one's number was used.
const TRIES_MAX: usize = 3;
/// Limit of requests, because a client that repeats without end would pass every other check.
const REQUESTS_MAX: u64 = 120;

/// End that a scene reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    None,
    /// The scene succeeded in spite of the fault.
    WithFault,
    /// The scene succeeded in a run without a fault.
    Clean,
}

/// Result of a cell.
struct Row {
    cell: Cell,
    fired: u64,
    requests: u64,
    first: Option<Failure>,
    tries: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cell, fired, requests, first, tries } = self;
        write!(f, "{cell} fired {fired:>3} of {requests:>3}  ")?;
        match first {
            None => f.write_str("done"),
            Some(Failure { then: Then::Next, why }) => write!(f, "absent, the next after {tries}: {why:.90}"),
            Some(Failure { why, .. }) => write!(f, "absent, done after {tries}: {why:.90}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_request_goes_wrong_a_version_is_whole_or_absent_and_the_next_try_commits() {
    let sealer = Arc::new(Sealer::new());
    // Cells that wait for many requests belong to the long form.
    let cells: Vec<_> = cells::all().into_iter().filter(|cell| machine::long() || !cell.is_slow()).collect();
    let count = cells.len();
    let runs = cells.into_iter().enumerate().map(|(number, cell)| {
        let sealer = Arc::clone(&sealer);
        async move {
            let run = tokio::spawn(async move { run(cell, sealer).await });
            let row = run.await.unwrap_or_else(|error| Err(error.to_string()));
            (number, row.map_err(|why| format!("{cell}\n    {why}")))
        }
    });
    let mut rows: Vec<_> = futures::stream::iter(runs).buffer_unordered(CELLS_AT_ONCE).collect().await;
    rows.sort_by_key(|(number, _)| *number);
    let mut wrong = Vec::new();
    for (_, row) in rows {
        match row {
            Ok(row) => show(&row),
            Err(why) => wrong.push(why),
        }
    }
    assert!(wrong.is_empty(), "{} of {count} cells:\n{}", wrong.len(), wrong.join("\n"));
}

#[expect(clippy::print_stdout, reason = "the table is what a person runs it for")]
fn show(row: &Row) {
    println!("{row}");
}

async fn run(cell: Cell, sealer: Arc<Sealer>) -> Result<Row, String> {
    let mut site = Site::start(&cell, sealer).await;
    let faults = Arc::clone(&site.server.faults);
    let before = faults.requests(cell.target.operation);
    let add = |operation, key: &str, nth, effect| {
        faults.add(Fault { operation, key_contains: key.to_owned(), nth, effect })
    };
    let given = cell.target.given.map(|(operation, key, nth, effect)| add(operation, key, nth, effect));
    let nth = (cell.met == cells::Met::Once).then_some(1);
    let number = add(cell.target.operation, cell.target.object, nth, cell.effect);

    let drain = site.drain(Duration::from_millis(cell.timeout_ms())).await;
    let first = site.play(&drain).await.err();
    let begun = Instant::now();
    while faults.fired(number) == 0 || given.is_some_and(|given| faults.fired(given) == 0) {
        if cell.target.scene != Scene::Restart || begun.elapsed() > FIRED_LIMIT {
            return Err(format!("the fault met no request; the first run came to {first:?}"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    match (cell.expected(), &first) {
        (Expected::Done, Some(failure)) => return Err(format!("once is too much for it: {failure:?}")),
        (Expected::NotDone, None) => return Err("it says that it is done".to_owned()),
        _ => {}
    }
    let done = if first.is_none() { End::WithFault } else { End::None };
    audit(&site, &cell, done).map_err(|why| format!("with the fault: {why}; came to {first:?}"))?;
    faults.lift();
    let (fired, requests) = (faults.fired(number), faults.requests(cell.target.operation) - before);
    if requests > REQUESTS_MAX {
        return Err(format!("{requests} requests, at most {REQUESTS_MAX}"));
    }

    let mut then = first.as_ref().map_or(Then::Again, |failure| failure.then);
    if then == Then::Lost {
        return Err(format!("the loop would not try it again: {first:?}"));
    }
    let mut tries = 1;
    let drain = Arc::clone(&site.clean);
    loop {
        site.go_on(then);
        let Err(failure) = site.play(&drain).await else { break };
        if failure.then == Then::Lost || tries == TRIES_MAX {
            return Err(format!("without the fault: {failure:?}; came to {first:?}"));
        }
        then = failure.then;
        tries += 1;
    }
    site.settled().await?;
    audit(&site, &cell, End::Clean).map_err(|why| format!("without the fault: {why}; came to {first:?}"))?;
    if let Some(late_ms) = cell.late_ms() {
        tokio::time::sleep(Duration::from_millis(late_ms)).await;
        audit(&site, &cell, End::Clean).map_err(|why| format!("after the late effect: {why}"))?;
    }
    let read = read_back(&site.clean.store).await?;
    stands(&site, &cell, End::Clean, &read).map_err(|why| format!("as the engine reads it: {why}"))?;
    Ok(Row { cell, fired, requests, first, tries })
}

/// Examines the bucket itself.
fn audit(site: &Site, cell: &Cell, end: End) -> Result<(), String> {
    let objects = site.server.objects(PREFIX).map_err(|error| error.to_string())?;
    let found = audit::markers(&objects)?;
    if !found.unreadable.is_empty() && !cell.is_damage_taken() {
        return Err(format!("no documents: {:?}", found.unreadable));
    }
    if site.has_loose() {
        let loose = audit::loose(&objects)?;
        let whole = loose == site.sealer.loose_files();
        return if whole || (loose.is_empty() && end == End::None) {
            Ok(())
        } else {
            Err("the loose file".to_owned())
        };
    }
    stands(site, cell, end, &found.committed)
}

fn stands(site: &Site, cell: &Cell, end: End, found: &BTreeMap<String, audit::Files>) -> Result<(), String> {
    let (must, may) = (site.must_stand(end != End::None), site.may_stand());
    for (version, files) in &must {
        match found.get(version) {
            None => return Err(format!("{version} is not committed")),
            Some(there) if there != files => return Err(format!("{version} has other bytes")),
            Some(_) => {}
        }
    }
    for (version, files) in found {
        let expected = must.get(version).or_else(|| may.get(version));
        if expected != Some(files) {
            return Err(format!("{version} is committed, and not as it was saved"));
        }
    }
    // A start commits a version that it finds prepared, unless a listing hid that it is.
    let prepared = super::save::version_id(3).to_string();
    let must = cell.target.scene == Scene::Restart && end == End::Clean && !cell.is_stale();
    if !must || found.contains_key(&prepared) {
        return Ok(());
    }
    Err(format!("{prepared} was prepared, and the start did not commit it"))
}
