//! Bytes: reading and writing them, sizes, holes, mappings.

use super::table::{Scenario, fresh_and_at_rest, otherwise, scenario};
use super::world::{World, short, truncate};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::{Duration, SystemTime};

fn update(w: &World, name: &str) -> File {
    OpenOptions::new().read(true).write(true).open(w.path(name)).unwrap()
}

type Change = fn(&World, &File);

/// Changes that move the time of a file that is open, and others that do not.
const TIMED: [(&str, Change); 8] = [
    ("nothing", |_, _| ()),
    ("a write", |_, file| file.write_all_at(b"y", 0).unwrap()),
    ("a write of nothing", |_, file| assert_eq!(file.write_at(b"", 0).unwrap(), 0)),
    ("an append by another", |w, _| {
        OpenOptions::new().append(true).open(w.path("f")).unwrap().write_all(b"y").unwrap();
    }),
    ("a duplicate", |_, file| file.try_clone().unwrap().write_all_at(b"z", 1).unwrap()),
    ("a mode", |_, file| file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap()),
    ("a smaller size", |_, file| file.set_len(3).unwrap()),
    ("a link", |w, _| fs::hard_link(w.path("f"), w.path("g")).unwrap()),
];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (size, words) in [(0, "nothing"), (3, "less"), (100_000, "the size"), (300_000, "more")] {
        all.extend(fresh_and_at_rest(&format!("truncate to {words}"), move |w, make| {
            make("f", &[7; 100_000]);
            w.saw("truncate", truncate(&w.path("f"), size));
            w.stat("f");
            w.read("f");
        }));
        all.extend(fresh_and_at_rest(&format!("ftruncate to {words}, beside a reader"), move |w, make| {
            make("f", &[7; 100_000]);
            let file = update(w, "f");
            let reader = File::open(w.path("f")).unwrap();
            w.saw("truncate", file.set_len(size));
            w.saw("size", reader.metadata().map(|found| found.len()));
            let mut bytes = [1; 8];
            w.saw("read", reader.read_at(&mut bytes, 0).map(|n| bytes[..n].to_vec()));
        }));
    }
    all.extend(fresh_and_at_rest("appends of two", |w, make| {
        make("f", b"0");
        let mut one = OpenOptions::new().append(true).open(w.path("f")).unwrap();
        let mut other = OpenOptions::new().append(true).open(w.path("f")).unwrap();
        for round in 0..3 {
            w.saw("one", one.write(b"one"));
            w.saw("other", other.write(b"other"));
            w.note("round", round);
        }
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("an update in the middle", |w, make| {
        make("f", &[1; 10_000]);
        let file = update(w, "f");
        w.saw("write", file.write_at(b"middle", 5_000));
        w.saw("beyond", file.write_at(b"end", 20_000));
        drop(file);
        w.stat("f");
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("a shared mapping", |w, make| {
        make("f", &[1; 20_000]);
        let file = update(w, "f");
        // SAFETY: no program truncates the file while it is mapped.
        let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        map[10_000] = 9;
        w.saw("sync", map.flush());
        drop((map, file));
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("a private mapping keeps its stores to itself", |w, make| {
        make("f", &[1; 20_000]);
        let file = File::open(w.path("f")).unwrap();
        // SAFETY: no program truncates the file while it is mapped.
        let mut map = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        map[0] = 9;
        w.note("mapped", short(&map));
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("a mapping outlives the name and the descriptor", |w, make| {
        make("f", &[3; 20_000]);
        let file = File::open(w.path("f")).unwrap();
        // SAFETY: no program truncates the file while it is mapped.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        drop(file);
        fs::remove_file(w.path("f")).unwrap();
        w.note("mapped", short(&map));
    }));
    all.extend(fresh_and_at_rest("what is written by one is read by the other", |w, make| {
        make("f", b"0000000000");
        let (writer, reader) = (update(w, "f"), File::open(w.path("f")).unwrap());
        for at in 0..5 {
            writer.write_at(&[b'a' + at], u64::from(at)).unwrap();
            let mut bytes = [0; 10];
            w.saw("read", reader.read_at(&mut bytes, 0).map(|n| short(&bytes[..n])));
        }
    }));
    all.extend(fresh_and_at_rest("copied by the kernel", |w, make| {
        make("f", &[5; 50_000]);
        w.saw("copy", fs::copy(w.path("f"), w.path("g")));
        w.read("g");
        let (from, to) = (File::open(w.path("f")).unwrap(), File::create(w.path("h")).unwrap());
        w.saw("send", rustix::fs::sendfile(&to, &from, None, 60_000));
        drop(to);
        w.read("h");
    }));
    for (words, flags) in [
        ("allocated", FallocateFlags::empty()),
        ("allocated beyond the end", FallocateFlags::KEEP_SIZE),
        ("punched", FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE)),
    ] {
        all.push(scenario(format!("a range is {words}"), move |w| {
            w.put("f", &[1; 20_000]);
            w.saw("allocate", fallocate(update(w, "f"), flags, 8192, 50_000));
            w.stat("f");
            w.read("f");
        }));
    }
    all.extend(fresh_and_at_rest("a time that is set while a file is open", |w, make| {
        make("f", b"bytes");
        let file = update(w, "f");
        let set = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let stays = |what: &str| w.saw(what, file.metadata().and_then(|found| Ok(found.modified()? == set)));
        for (what, change) in TIMED {
            file.set_modified(set).unwrap();
            stays("set");
            change(w, &file);
            stays(what);
        }
        file.set_modified(set).unwrap();
        drop(file);
        w.rest("f");
        w.note("closed", fs::metadata(w.path("f")).unwrap().modified().unwrap() == set);
    }));
    all.extend([
        scenario("the wrong end of a descriptor", |w| {
            w.put("f", b"x");
            let mut reader = File::open(w.path("f")).unwrap();
            let mut writer = OpenOptions::new().write(true).open(w.path("f")).unwrap();
            w.saw("write", reader.write(b"y"));
            w.saw("read", writer.read(&mut [0]));
            w.saw("truncate", reader.set_len(0));
            w.saw("allocate", fallocate(&reader, FallocateFlags::empty(), 0, 10));
            w.saw("allocate nothing", fallocate(&writer, FallocateFlags::empty(), 0, 0));
        }),
        scenario("reads at and beyond the end", |w| {
            w.put("f", b"0123456789");
            let file = File::open(w.path("f")).unwrap();
            for at in [0, 8, 10, 11, 1 << 40] {
                let mut bytes = [0; 4];
                w.saw("read", file.read_at(&mut bytes, at).map(|n| short(&bytes[..n])));
            }
        }),
        scenario("a hole reads as zeros", |w| {
            let file = w.open("f", OFlags::RDWR | OFlags::CREATE).unwrap();
            w.saw("write", file.write_at(b"end", 1 << 20));
            drop(file);
            w.stat("f");
            w.read("f");
        }),
        scenario("empty writes change nothing", |w| {
            w.put("f", b"x");
            let file = update(w, "f");
            w.saw("write", file.write_at(b"", 100));
            w.stat("f");
        }),
        scenario("seeking", |w| {
            w.put("f", b"0123456789");
            let file = update(w, "f");
            for to in [SeekFrom::Start(20), SeekFrom::End(-3), SeekFrom::Current(1), SeekFrom::Current(-100)]
            {
                w.saw("seek", rustix::fs::seek(&file, to));
            }
            w.saw("data", rustix::fs::seek(&file, SeekFrom::Data(0)));
            w.saw("hole", rustix::fs::seek(&file, SeekFrom::Hole(0)));
            w.saw("no data", rustix::fs::seek(&file, SeekFrom::Data(10)));
        }),
        scenario("sizes that no file has", |w| {
            w.put("f", b"x");
            w.saw("truncate", truncate(&w.path("f"), u64::MAX));
            w.saw("directory", truncate(&w.path(""), 0));
            w.saw("nothing", truncate(&w.path("none"), 0));
            w.stat("f");
        }),
        scenario("a descriptor that was shared has one offset", |w| {
            w.put("f", b"0123456789");
            let mut one = File::open(w.path("f")).unwrap();
            let mut other = one.try_clone().unwrap();
            let mut bytes = [0; 4];
            one.read_exact(&mut bytes).unwrap();
            other.read_exact(&mut bytes).unwrap();
            w.note("read", short(&bytes));
        }),
        scenario("O_DIRECT of whole pages", |w| {
            w.put("f", &[4; 8192]);
            let file = w.open("f", OFlags::RDONLY | OFlags::DIRECT);
            w.saw("open", file.as_ref().map(drop).map_err(|errno| *errno));
        }),
        scenario("fsync of all that can be", |w| {
            w.put("f", b"x");
            let file = update(w, "f");
            w.saw("file", rustix::fs::fsync(&file));
            w.saw("data", rustix::fs::fdatasync(&file));
            w.saw("directory", rustix::fs::fsync(File::open(w.path("")).unwrap()));
        }),
        scenario("a write moves mtime and a read does not", |w| {
            w.put("f", b"x");
            let time = |w: &World| fs::metadata(w.path("f")).map(|m| (m.mtime(), m.mtime_nsec())).unwrap();
            let before = time(w);
            w.read("f");
            w.note("read", time(w) == before);
            // The kernel's clock moves in ticks.
            std::thread::sleep(Duration::from_millis(20));
            w.put("f", b"y");
            w.note("write", time(w) > before);
        }),
        otherwise("S-seek", "where the holes are", |w| {
            let file = w.open("f", OFlags::RDWR | OFlags::CREATE).unwrap();
            file.write_at(b"end", 1 << 20).unwrap();
            w.saw("data", rustix::fs::seek(&file, SeekFrom::Data(0)));
        }),
    ]);
    all
}
