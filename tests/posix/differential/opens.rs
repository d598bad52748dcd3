//! Opens: every kind of target with every kind of flags, and opens without a name.

use super::table::{Scenario, fresh_and_at_rest, otherwise, scenario};
use super::world::{World, truncate};
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};

const FLAGS: [(&str, OFlags); 9] = [
    ("O_RDONLY", OFlags::RDONLY),
    ("O_WRONLY", OFlags::WRONLY),
    ("O_CREAT", OFlags::RDWR.union(OFlags::CREATE)),
    ("O_CREAT|O_EXCL", OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL)),
    ("O_TRUNC", OFlags::WRONLY.union(OFlags::TRUNC)),
    ("O_RDONLY|O_TRUNC", OFlags::RDONLY.union(OFlags::TRUNC)),
    ("O_DIRECTORY", OFlags::DIRECTORY),
    ("O_NOFOLLOW", OFlags::NOFOLLOW),
    ("O_PATH|O_NOFOLLOW", OFlags::PATH.union(OFlags::NOFOLLOW)),
];

type Make = fn(&World);

const TARGETS: [(&str, Make); 6] = [
    ("nothing", |_| ()),
    ("a file", |w| w.put("t", b"bytes")),
    ("a file at rest", |w| w.at_rest("t", b"bytes")),
    ("a directory", |w| fs::create_dir(w.path("t")).unwrap()),
    ("a symlink to a file", |w| {
        w.put("real", b"bytes");
        symlink("real", w.path("t")).unwrap();
    }),
    ("a symlink to nothing", |w| symlink("real", w.path("t")).unwrap()),
];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (target, make) in TARGETS {
        for (words, flags) in FLAGS {
            all.push(scenario(format!("open {target} with {words}"), move |w| {
                make(w);
                drop(w.opens("t", flags));
                w.stat("t");
                w.read("t");
                w.list("");
            }));
        }
    }
    all.extend(fresh_and_at_rest("open an unlinked file by its descriptor", |w, make| {
        make("f", b"bytes");
        let open = File::open(w.path("f")).unwrap();
        fs::remove_file(w.path("f")).unwrap();
        let again = format!("/proc/self/fd/{}", open.as_raw_fd());
        w.saw("read", fs::read(&again).map(|bytes| bytes.len()));
        w.saw("write", fs::write(&again, b"new"));
        w.saw("read", fs::read(&again).map(|bytes| bytes.len()));
        w.saw("links", open.metadata().map(|found| found.nlink()));
    }));
    all.extend(fresh_and_at_rest("truncate by descriptor", |w, make| {
        make("f", b"bytes");
        let open = File::open(w.path("f")).unwrap();
        let again = format!("/proc/self/fd/{}", open.as_raw_fd());
        w.saw("open", OpenOptions::new().write(true).truncate(true).open(&again).map(drop));
        w.stat("f");
        w.saw("size", open.metadata().map(|found| found.len()));
        w.saw("append", OpenOptions::new().append(true).open(&again).and_then(|mut f| f.write_all(b"more")));
        w.read("f");
        w.saw("truncate", truncate(again.as_ref(), 2));
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("open what was replaced through O_PATH", |w, make| {
        make("f", b"old");
        let known = w.open("f", OFlags::PATH).unwrap();
        make("f.tmp", b"new");
        fs::rename(w.path("f.tmp"), w.path("f")).unwrap();
        w.saw("read", fs::read_to_string(format!("/proc/self/fd/{}", known.as_raw_fd())));
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("open what was removed through O_PATH", |w, make| {
        make("f", b"old");
        let known = w.open("f", OFlags::PATH).unwrap();
        fs::remove_file(w.path("f")).unwrap();
        let again = format!("/proc/self/fd/{}", known.as_raw_fd());
        w.saw("read", fs::read_to_string(&again));
        w.saw("append", OpenOptions::new().append(true).open(&again).and_then(|mut f| f.write_all(b"er")));
        w.saw("read", fs::read_to_string(&again));
    }));
    all.extend(fresh_and_at_rest("two opens with O_TRUNC share the file", |w, make| {
        make("f", b"old bytes");
        let mut first = w.open("f", OFlags::RDWR | OFlags::TRUNC).unwrap();
        let mut second = w.open("f", OFlags::RDWR | OFlags::TRUNC).unwrap();
        w.saw("write", first.write(b"12345"));
        w.saw("write", second.write(b"ab"));
        w.read("f");
        w.note("one inode", first.metadata().unwrap().ino() == second.metadata().unwrap().ino());
    }));
    all.extend([
        scenario("open a file below a file", |w| {
            w.put("f", b"");
            drop(w.opens("f/x", OFlags::RDONLY));
            drop(w.opens("f/x", OFlags::RDWR | OFlags::CREATE));
            drop(w.opens("f/", OFlags::RDONLY));
        }),
        scenario("create in a removed directory", |w| {
            fs::create_dir(w.path("d")).unwrap();
            let directory = w.open("d", OFlags::DIRECTORY).unwrap();
            fs::remove_dir(w.path("d")).unwrap();
            let mode = rustix::fs::Mode::RUSR;
            w.saw(
                "create",
                rustix::fs::openat(&directory, "x", OFlags::CREATE | OFlags::RDWR, mode).map(drop),
            );
            w.saw("mkdir", rustix::fs::mkdirat(&directory, "x", mode));
            w.saw("list", rustix::fs::Dir::read_from(&directory).map(|d| d.count()));
        }),
        scenario("a name too long", |w| {
            drop(w.opens(&"n".repeat(256), OFlags::CREATE | OFlags::RDWR));
            drop(w.opens(&"n".repeat(255), OFlags::CREATE | OFlags::RDWR));
        }),
        scenario("a symlink that leads to itself", |w| {
            symlink("loop", w.path("loop")).unwrap();
            drop(w.opens("loop", OFlags::RDONLY));
            w.stat("loop");
        }),
        scenario("a mode without rights is kept", |w| {
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o000).open(w.path("f")).unwrap();
            w.stat("f");
        }),
        scenario("a descriptor reads on after a rename", |w| {
            w.put("f", b"0123456789");
            let mut open = File::open(w.path("f")).unwrap();
            let mut half = [0; 5];
            open.read_exact(&mut half).unwrap();
            fs::rename(w.path("f"), w.path("g")).unwrap();
            let mut rest = String::new();
            w.saw("read", open.read_to_string(&mut rest).map(|_| rest.clone()));
            w.read("f");
        }),
        otherwise("S-mknod", "an unnamed file", |w| {
            drop(w.opens("", OFlags::TMPFILE | OFlags::RDWR));
        }),
        // On all other file systems, old readers see the truncation.
        otherwise("S-trunc", "a reader of a file at rest that is overwritten", |w| {
            w.at_rest("f", b"old bytes");
            let mut reader = File::open(w.path("f")).unwrap();
            w.put("f", b"new");
            w.read("f");
            let mut seen = String::new();
            w.saw("read", reader.read_to_string(&mut seen).map(|_| seen.clone()));
        }),
    ]);
    all
}
