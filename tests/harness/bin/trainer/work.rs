//! Ways of saving with one file at a time. Each function is one round: nothing is open before and after it.
//!
//! Owns: the calls and their order. Sizes are bounded and names are reused, so that the files fit into Tier-1.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use tidemark_tests::campaign::event::{By, Bytes, Holds};
use tidemark_tests::campaign::page::Act;

use crate::acts::{Stop, Trainer};
use crate::calls;

const MIB: usize = 1 << 20;
const KIB: u64 = 1 << 10;
/// Names that a kind uses in turn.
const RING: u64 = 3;
/// Size of a single write(2) that takes long enough for a kill to hit it.
const BULK_BYTES: usize = 24 * MIB + 1;
const BULK_RING: u64 = 2;
/// Size from which a log starts over.
const LOG_BYTES_MAX: usize = 2 * MIB;
/// Alignment that satisfies O_DIRECT wherever it demands one.
const SECTOR_BYTES: usize = 4096;

fn create() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    options
}

/// Pauses as a trainer that computes between two saves, and so leaves processor time to other trainers.
fn think(trainer: &mut Trainer) {
    std::thread::sleep(Duration::from_micros(trainer.dice.within(500..8_000)));
}

/// Returns the next name of the ring. In a quarter of the calls the existing file is removed first.
fn ring(trainer: &mut Trainer, what: &str) -> Result<String, Stop> {
    let name = format!("{what}-{}.bin", trainer.round % RING);
    let there = trainer.round >= RING;
    trainer.round += 1;
    if there && trainer.dice.one_in(4) {
        trainer.unlink(&name)?;
    }
    Ok(name)
}

/// Saves as torch.save does: O_TRUNC, 1 MiB writes in order, close. Now and then, syncs in the middle.
pub(crate) fn sequential(trainer: &mut Trainer) -> Result<(), Stop> {
    let name = ring(trainer, "state")?;
    let size_bytes = trainer.dice.within(2 * KIB * KIB..8 * KIB * KIB);
    let bytes = trainer.dice.bytes(usize::try_from(size_bytes).expect("some MiB"));
    trainer.will(&name, None)?;
    let mut file = trainer.open(&name, &create())?;
    let mut written = 0;
    for part in bytes.chunks(MIB) {
        trainer.write(&name, &mut file, part)?;
        written += part.len();
        if trainer.dice.one_in(3) {
            trainer.fsync(&name, &file, &bytes[..written])?;
        }
    }
    trainer.close(&name, file, &bytes)?;
    if trainer.dice.one_in(2) {
        trainer.stat(&name, bytes.len())?;
    }
    think(trainer);
    Ok(())
}

/// Saves as torch.save of one large tensor: the whole file in one write.
pub(crate) fn bulk(trainer: &mut Trainer) -> Result<(), Stop> {
    let name = format!("bulk-{}.bin", trainer.round % BULK_RING);
    trainer.round += 1;
    let bytes = trainer.dice.bytes(BULK_BYTES);
    trainer.will(&name, None)?;
    let mut file = trainer.open(&name, &create())?;
    trainer.write(&name, &mut file, &bytes)?;
    trainer.close(&name, file, &bytes)?;
    think(trainer);
    Ok(())
}

/// Saves as safetensors and the wheel do: sets the size, then stores into a mapping. Unmaps it before or after the close.
pub(crate) fn mapped(trainer: &mut Trainer) -> Result<(), Stop> {
    let name = ring(trainer, "mapped")?;
    let size_bytes = trainer.dice.within(KIB * KIB..6 * KIB * KIB);
    let bytes = trainer.dice.bytes(usize::try_from(size_bytes).expect("some MiB"));
    trainer.will(&name, None)?;
    let file = trainer.open(&name, create().read(true))?;
    trainer.act(Act::Truncate, &name, || file.set_len(size_bytes))?;
    let mut mapping = trainer.act(Act::Map, &name, || calls::map(&file))?;
    let mut file = Some(file);
    for (number, part) in bytes.chunks(MIB).enumerate() {
        let at = number * MIB;
        trainer.act(Act::Store, &name, || {
            mapping[at..at + part.len()].copy_from_slice(part);
            Ok(())
        })?;
        if trainer.dice.one_in(8) {
            trainer.act(Act::Fsync, &name, || mapping.flush())?;
        }
        if trainer.dice.one_in(8)
            && let Some(file) = file.take()
        {
            // After the close, the file's content is whatever the mapping holds when it ends, even if the trainer is killed.
            trainer.will(&name, Some(Holds::Begins(Bytes::of(&[]))))?;
            trainer.act(Act::Close, &name, || calls::close(file))?;
        }
    }
    trainer.act(Act::Map, &name, || {
        drop(mapping);
        Ok(())
    })?;
    // The promise follows the later of unmap and close.
    match file {
        Some(file) => trainer.close(&name, file, &bytes)?,
        None => trainer.is(&name, Holds::Whole(Bytes::of(&bytes)), By::Close)?,
    }
    think(trainer);
    Ok(())
}

/// Saves by a temporary name: write, sync, rename over the old file. Some saves rename through further names first.
pub(crate) fn renaming(trainer: &mut Trainer) -> Result<(), Stop> {
    trainer.round += 1;
    let size_bytes = trainer.dice.within(KIB..256 * KIB);
    let bytes = trainer.dice.bytes(usize::try_from(size_bytes).expect("some KiB"));
    trainer.will("model.tmp", None)?;
    let mut file = trainer.open("model.tmp", create().create_new(true))?;
    trainer.write("model.tmp", &mut file, &bytes)?;
    if trainer.dice.one_in(2) {
        trainer.fsync("model.tmp", &file, &bytes)?;
    }
    trainer.close("model.tmp", file, &bytes)?;
    for (from, to) in [("model.tmp", "model.a"), ("model.a", "model.b"), ("model.b", "model.bin")] {
        trainer.rename(from, to)?;
    }
    if trainer.dice.one_in(4) {
        trainer.stat("model.bin", bytes.len())?;
    }
    Ok(())
}

/// Saves as DeepSpeed does: O_DIRECT, aligned.
pub(crate) fn direct(trainer: &mut Trainer) -> Result<(), Stop> {
    let name = ring(trainer, "direct")?;
    let parts = usize::try_from(trainer.dice.within(1..5)).expect("few");
    let room = trainer.dice.bytes(parts * MIB + SECTOR_BYTES);
    let from = room.as_ptr().align_offset(SECTOR_BYTES);
    let bytes = &room[from..from + parts * MIB];
    trainer.will(&name, None)?;
    let mut file = trainer.open(&name, create().custom_flags(libc::O_DIRECT))?;
    for part in bytes.chunks(MIB) {
        trainer.write(&name, &mut file, part)?;
    }
    if trainer.dice.one_in(3) {
        trainer.fsync(&name, &file, bytes)?;
    }
    trainer.close(&name, file, bytes)?;
    think(trainer);
    Ok(())
}

/// Writes a log: opens, appends and closes for each record. A record that is there twice was executed twice.
pub(crate) fn append(trainer: &mut Trainer) -> Result<(), Stop> {
    let count = usize::try_from(RING).expect("few");
    if trainer.logs.is_empty() {
        trainer.logs = vec![vec![]; count];
    }
    let log = usize::try_from(trainer.round).expect("rounds are counted") % count;
    trainer.round += 1;
    let name = format!("log-{log}.txt");
    if trainer.logs[log].len() > LOG_BYTES_MAX {
        trainer.logs[log].clear();
        trainer.unlink(&name)?;
    }
    let size_bytes = trainer.dice.within(1..64 * KIB);
    let record = trainer.dice.bytes(usize::try_from(size_bytes).expect("some KiB"));
    let before = Bytes::of(&trainer.logs[log]);
    trainer.will(&name, Some(Holds::Begins(before)))?;
    let mut file = trainer.open(&name, OpenOptions::new().append(true).create(true))?;
    trainer.write(&name, &mut file, &record)?;
    trainer.logs[log].extend_from_slice(&record);
    trainer.close(&name, file, &trainer.logs[log])?;
    think(trainer);
    Ok(())
}

/// Removes files, some while they are open. Their bytes must stay readable until the file is closed.
pub(crate) fn unlinking(trainer: &mut Trainer) -> Result<(), Stop> {
    let name = format!("passing-{}.bin", trainer.round % RING);
    trainer.round += 1;
    let size_bytes = trainer.dice.within(1..512 * KIB);
    let bytes = trainer.dice.bytes(usize::try_from(size_bytes).expect("some KiB"));
    trainer.will(&name, None)?;
    // O_EXCL: EEXIST would be a create or an unlink that was not executed once.
    let mut file = trainer.open(&name, OpenOptions::new().read(true).write(true).create_new(true))?;
    let half = bytes.len() / 2;
    trainer.write(&name, &mut file, &bytes[..half])?;
    let early = trainer.dice.one_in(2);
    if early {
        trainer.unlink(&name)?;
    }
    trainer.write(&name, &mut file, &bytes[half..])?;
    let mut read = vec![];
    trainer.act(Act::Read, &name, || {
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut read)
    })?;
    trainer.believe(&name, read == bytes, || format!("an open file holds {} other bytes", read.len()))?;
    if early {
        trainer.act(Act::Close, &name, || calls::close(file))?;
    } else {
        trainer.close(&name, file, &bytes)?;
        trainer.unlink(&name)?;
    }
    Ok(())
}
