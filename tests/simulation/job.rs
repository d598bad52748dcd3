//! The cluster's workload: training that saves, and other processes that make, rename, remove and look up files.
//!
//! Owns: the processes, and reporting each call's promise to the truth. Does not own: the calls (`files`), the
//! promises (`invariants`).

use super::exec::Owner;
use super::files::{Call, Done, Failure, Process};
use super::invariants::{Expected, coordinator};
use super::names::Errno;
use super::world::World;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::WireFate;
use tidemark_protocol::id::{Epoch, FileId};

/// Shortest time to write a chunk.
const WRITE_LEAST: Duration = Duration::from_millis(2);
const WRITE_MOST: Duration = Duration::from_millis(60);
/// Number of ranks in a thousand that are killed while they save.
const KILLED: u64 = 20;
/// Time between a rank's arrival at the barrier and the rank that writes the marker.
const BARRIER: Duration = Duration::from_millis(1);

/// Returns the epoch of a change that began in `before`, or `None` if another epoch began meanwhile.
fn epoch(world: &World, before: Option<Epoch>) -> Option<Epoch> {
    now(world).filter(|epoch| Some(*epoch) == before)
}

fn now(world: &World) -> Option<Epoch> {
    coordinator(world).map(|catalog| catalog.epoch)
}

impl Process {
    /// Creates a file, and records the result in the truth.
    async fn makes(&self, path: &[u8], exclusive: bool) -> Result<FileId, Failure> {
        let truth = || self.world.truth.borrow_mut();
        let (before, began) = (now(&self.world), self.world.now());
        truth().changing(path);
        match self.call(Call::Create { path: path.to_vec(), exclusive }).await {
            Ok(Done::File { file, in_outage }) => {
                if exclusive {
                    self.world.count("exclusive create won");
                    truth().won(&self.world, path, file, began);
                }
                truth().changed(self.life, path, Some((file, in_outage)), epoch(&self.world, before));
                Ok(file)
            }
            Ok(Done::Nothing) => unreachable!("a create makes a file"),
            Err(failure) => {
                if failure == Failure::Errno(Errno::Exists) {
                    self.world.count("exclusive create lost");
                }
                let is_known = matches!(failure, Failure::Errno(Errno::Exists | Errno::NotFound));
                truth().unchanged(path, is_known);
                Err(failure)
            }
        }
    }

    async fn closes(&self, file: FileId) -> Result<(), Failure> {
        self.call(Call::Close { file, cut: false }).await.map(drop)
    }

    /// Creates a file, writes these chunks, and closes it.
    async fn writes(&self, path: &[u8], content: &[u64], exclusive: bool) -> Result<FileId, Failure> {
        let file = self.makes(path, exclusive).await?;
        for content in content {
            self.world.sleep(self.world.rng.between(WRITE_LEAST, WRITE_MOST)).await;
            self.write(file, *content)?;
        }
        self.closes(file).await?;
        Ok(file)
    }

    async fn makes_directory(&self, path: &[u8]) -> Result<(), Failure> {
        self.call(Call::MakeDirectory(path.to_vec())).await.map(drop)
    }

    /// Renames a file to a name that may exist.
    async fn renames(&self, from: &[u8], to: &[u8], file: FileId) -> Result<(), Failure> {
        let truth = || self.world.truth.borrow_mut();
        let before = now(&self.world);
        truth().changing(from);
        truth().changing(to);
        let result = self.call(Call::Rename { from: from.to_vec(), to: to.to_vec() }).await;
        match result {
            Ok(_) => {
                truth().changed(self.life, from, None, epoch(&self.world, before));
                truth().changed(self.life, to, Some((file, false)), epoch(&self.world, before));
                Ok(())
            }
            Err(failure) => {
                truth().unchanged(from, false);
                truth().unchanged(to, false);
                Err(failure)
            }
        }
    }

    async fn removes(&self, path: &[u8]) -> Result<(), Failure> {
        let truth = || self.world.truth.borrow_mut();
        let before = now(&self.world);
        truth().changing(path);
        match self.call(Call::Unlink(path.to_vec())).await {
            Ok(_) => {
                truth().changed(self.life, path, None, epoch(&self.world, before));
                Ok(())
            }
            Err(failure) => {
                truth().unchanged(path, false);
                Err(failure)
            }
        }
    }

    async fn looks(&self, path: &[u8]) {
        let before: Option<Expected> = self.world.truth.borrow().expected(path, self.world.now());
        let found = match self.call(Call::Look(path.to_vec())).await {
            // During an outage a node serves the file that it knows, which may be old.
            Ok(Done::File { in_outage: true, .. }) => return,
            Ok(Done::File { file, .. }) => Some(file),
            Ok(Done::Nothing) | Err(Failure::Errno(Errno::NotFound)) => None,
            Err(Failure::Errno(Errno::Io)) => {
                self.world.count("look-up that nobody could answer");
                return;
            }
            Err(_) => return,
        };
        self.world.count("look-up answered");
        if let Some(before) = before {
            self.world.truth.borrow_mut().looked(&self.world, self.life, path, &before, found);
        }
    }
}

/// Returns the machines with a living node.
fn machines_up(world: &World) -> Vec<usize> {
    let up = |machine: &usize| world.machines[*machine].memory.borrow().is_some();
    (0..world.machines.len()).filter(up).collect()
}

/// Runs a training job. Again and again, its ranks save into one directory, and one of them writes a marker after a barrier.
pub(crate) async fn train(world: Rc<World>, run: usize, every: Duration) {
    let mut step = 0;
    while !world.calm.get() {
        world.sleep(world.rng.between(every / 2, every * 2)).await;
        step += 10;
        let up = machines_up(&world);
        let size = 1 + world.rng.below_usize(up.len().clamp(1, 4));
        let ranks: Vec<_> = (0..size)
            .filter_map(|rank| {
                let machine = *world.rng.one_of(&up)?;
                let of = Some((rank as u64, size as u64));
                Process::on(&world, machine, &format!("job-{run}-{step}"), of)
            })
            .collect();
        if ranks.len() < size {
            continue;
        }
        let directory = format!("run-{run}/step-{step}").into_bytes();
        if save(&world, run, &directory, &ranks, KILLED).await.is_err() {
            world.count("save that its job gave up");
        }
        // A process that ended by itself is no failure.
        ranks.iter().for_each(|rank| rank.ends(WireFate::Exited));
    }
}

/// Saves with one rank, which is not killed.
pub(crate) async fn save_of_one(
    world: &Rc<World>,
    run: usize,
    directory: &[u8],
    rank: &Process,
) -> Result<(), Failure> {
    save(world, run, directory, std::slice::from_ref(rank), 0).await
}

async fn save(
    world: &Rc<World>,
    run: usize,
    directory: &[u8],
    ranks: &[Process],
    killed: u64,
) -> Result<(), Failure> {
    let started = Rc::new(std::cell::RefCell::new(Vec::new()));
    let done: Rc<super::exec::Signal> = Rc::default();
    // Data-parallel ranks may write the same bytes.
    let same = world.rng.permille(300).then(|| world.rng.next());
    for (number, rank) in ranks.iter().enumerate() {
        let (rank, directory, started, done) =
            (rank.clone(), directory.to_vec(), Rc::clone(&started), Rc::clone(&done));
        let is_killed = world.rng.permille(killed) && !world.calm.get();
        let seed = same.unwrap_or_else(|| world.rng.next());
        let chunks = 1 + world.rng.below(4);
        world.spawn(Owner::World, async move {
            let content: Vec<u64> = (0..chunks).map(|chunk| seed.wrapping_add(chunk)).collect();
            let path = [&directory[..], format!("/rank-{number}.pt").as_bytes()].concat();
            let result = one_rank(&rank, run, &directory, &path, &content, is_killed).await;
            started.borrow_mut().push(result);
            done.tell();
        });
    }
    done.until(|| (started.borrow().len() == ranks.len()).then_some(())).await;
    if let Some(failure) = started.borrow().iter().find_map(|result| result.err()) {
        return Err(failure);
    }
    world.sleep(BARRIER).await;
    let marker = [directory, b"/done"].concat();
    let file = ranks[0].makes(&marker, false).await?;
    let content = world.rng.next();
    ranks[0].write(file, content)?;
    {
        let mut truth = world.truth.borrow_mut();
        let saved = truth.saved.entry(directory.to_vec()).or_default();
        saved.files.insert(marker, (file, vec![content]));
        saved.is_whole = true;
    }
    ranks[0].closes(file).await?;
    world.truth.borrow_mut().saved.entry(directory.to_vec()).or_default().is_done = true;
    world.count("save done");
    Ok(())
}

async fn one_rank(
    rank: &Process,
    run: usize,
    directory: &[u8],
    path: &[u8],
    content: &[u64],
    is_killed: bool,
) -> Result<(), Failure> {
    rank.makes_directory(format!("run-{run}").as_bytes()).await?;
    rank.makes_directory(directory).await?;
    let file = rank.makes(path, false).await?;
    for content in content {
        rank.world.sleep(rank.world.rng.between(WRITE_LEAST, WRITE_MOST)).await;
        rank.write(file, *content)?;
    }
    if is_killed {
        rank.world.count("trainer killed");
        rank.ends(WireFate::Killed);
        rank.call(Call::Close { file, cut: true }).await?;
        return Err(Failure::Died);
    }
    {
        let mut truth = rank.world.truth.borrow_mut();
        let saved = truth.saved.entry(directory.to_vec()).or_default();
        saved.files.insert(path.to_vec(), (file, content.to_vec()));
    }
    rank.closes(file).await?;
    rank.world.sleep(BARRIER).await;
    Ok(())
}

/// Runs processes on one machine that make, rename and remove files, and compete with other machines for lock files.
pub(crate) async fn tinker(world: Rc<World>, machine: usize) {
    let mut number = 0;
    while !world.calm.get() {
        world.sleep(world.rng.between(Duration::from_millis(200), Duration::from_secs(4))).await;
        let Some(process) = Process::on(&world, machine, "tinker", None) else { continue };
        number += 1;
        let what = world.rng.below(5);
        // A failure is allowed here. The truth has recorded its meaning.
        let _result = match what {
            0 => wants(&process, format!("locks/lock-{}", world.now().as_secs() / 3).as_bytes()).await,
            1 => replaces(&process, machine, number).await,
            2 => makes_and_removes(&process, machine, number).await,
            3 => moves_a_directory(&process, machine, number).await,
            _ => {
                let content = [world.rng.next()];
                process.writes(format!("loose/own-{machine}").as_bytes(), &content, false).await.map(drop)
            }
        };
        if let Err(Failure::Errno(Errno::Io)) = _result {
            world.count("call that failed with EIO");
        }
    }
}

async fn wants(process: &Process, path: &[u8]) -> Result<(), Failure> {
    process.makes_directory(b"locks").await?;
    let file = process.makes(path, true).await?;
    process.closes(file).await
}

async fn replaces(process: &Process, machine: usize, number: u64) -> Result<(), Failure> {
    process.makes_directory(b"loose").await?;
    let new = format!("loose/.tmp-{machine}-{number}").into_bytes();
    let file = process.writes(&new, &[process.world.rng.next()], false).await?;
    process.renames(&new, format!("loose/latest-{}", machine % 2).as_bytes(), file).await
}

async fn makes_and_removes(process: &Process, machine: usize, number: u64) -> Result<(), Failure> {
    process.makes_directory(b"loose").await?;
    let path = format!("loose/scratch-{machine}-{number}").into_bytes();
    process.writes(&path, &[process.world.rng.next()], true).await?;
    process.world.sleep(process.world.rng.between(Duration::ZERO, Duration::from_secs(5))).await;
    process.removes(&path).await
}

/// Fills a directory and renames it to its last name. Then this process and another compete for a lock file in it.
async fn moves_a_directory(process: &Process, machine: usize, number: u64) -> Result<(), Failure> {
    process.makes_directory(b"work").await?;
    let (new, last) = (format!("work/.new-{machine}-{number}"), format!("work/{machine}-{number}"));
    process.makes_directory(new.as_bytes()).await?;
    let file = process.makes(format!("{new}/first").as_bytes(), true).await?;
    process.closes(file).await?;
    // While the directory moves, its path is not known.
    let moving = process.world.truth.borrow_mut().names.remove(format!("{new}/first").as_bytes());
    process.call(Call::Rename { from: new.clone().into_bytes(), to: last.clone().into_bytes() }).await?;
    if let Some(moved) = moving {
        process.world.truth.borrow_mut().names.insert(format!("{last}/first").into_bytes(), moved);
    }
    let lock = format!("{last}/lock").into_bytes();
    let (world, other) = (Rc::clone(&process.world), lock.clone());
    let elsewhere = world.rng.below_usize(world.machines.len());
    if let Some(rival) = Process::on(&world, elsewhere, "rival", None) {
        world.spawn(Owner::World, async move {
            let pause = rival.world.rng.between(Duration::ZERO, Duration::from_millis(400));
            rival.world.sleep(pause).await;
            let _result = rival.makes(&other, true).await;
        });
    }
    world.sleep(world.rng.between(Duration::ZERO, Duration::from_millis(400))).await;
    let file = process.makes(&lock, true).await?;
    process.closes(file).await
}

/// Looks up names that other processes made, each time from a random machine.
pub(crate) async fn reader(world: Rc<World>) {
    loop {
        world.sleep(world.rng.between(Duration::from_millis(50), Duration::from_millis(700))).await;
        let path = {
            let truth = world.truth.borrow();
            let paths: Vec<_> = truth.names.keys().collect();
            // In half of the draws, only the last 30 names are candidates.
            let from = if world.rng.permille(500) { 0 } else { paths.len().saturating_sub(30) };
            world.rng.one_of(&paths[from..]).map(|path| (*path).clone())
        };
        let machine = world.rng.below_usize(world.machines.len());
        if let (Some(path), Some(process)) = (path, Process::on(&world, machine, "reader", None)) {
            world.spawn(Owner::World, async move { process.looks(&path).await });
        }
    }
}
