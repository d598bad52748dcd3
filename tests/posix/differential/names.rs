//! Names: making, moving, linking, removing and listing them, and their attributes.

use super::table::{Scenario, fresh_and_at_rest, otherwise, scenario};
use super::world::World;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags, linkat, mknodat,
    renameat_with, utimensat,
};
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

type Make = fn(&World, &str);

/// Kinds of files that a rename moves, and that it moves onto.
const KINDS: [(&str, Make); 6] = [
    ("nothing", |_, _| ()),
    ("a file", |w, name| w.put(name, name.as_bytes())),
    ("a file at rest", |w, name| w.at_rest(name, name.as_bytes())),
    ("a symlink", |w, name| symlink("nowhere", w.path(name)).unwrap()),
    ("an empty directory", |w, name| fs::create_dir(w.path(name)).unwrap()),
    ("a full directory", |w, name| {
        fs::create_dir(w.path(name)).unwrap();
        w.put(&format!("{name}/below"), b"x");
    }),
];

fn renames(w: &World, flags: RenameFlags) {
    w.saw("rename", renameat_with(CWD, w.path("from"), CWD, w.path("to"), flags));
    for name in ["from", "to"] {
        w.stat(name);
        w.read(name);
        w.list(name);
    }
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (from, make_from) in KINDS {
        for (to, make_to) in KINDS {
            all.push(scenario(format!("rename {from} onto {to}"), move |w| {
                make_from(w, "from");
                make_to(w, "to");
                renames(w, RenameFlags::empty());
            }));
        }
    }
    for (to, make_to) in [KINDS[0], KINDS[2], KINDS[5]] {
        all.push(scenario(format!("exchange a file with {to}"), move |w| {
            w.put("from", b"from");
            make_to(w, "to");
            renames(w, RenameFlags::EXCHANGE);
        }));
        all.push(scenario(format!("rename without replacing {to}"), move |w| {
            w.put("from", b"from");
            make_to(w, "to");
            renames(w, RenameFlags::NOREPLACE);
        }));
    }
    all.extend(fresh_and_at_rest("a replaced file lives on where it is open", |w, make| {
        make("f", b"old");
        let mut open = File::open(w.path("f")).unwrap();
        make("g", b"new");
        w.saw("rename", fs::rename(w.path("g"), w.path("f")));
        let mut text = String::new();
        w.saw("read", open.read_to_string(&mut text).map(|_| text.clone()));
        w.saw("links", open.metadata().map(|found| found.nlink()));
        w.read("f");
    }));
    all.extend(fresh_and_at_rest("a write by one name shows under all", |w, make| {
        make("a", b"old");
        fs::hard_link(w.path("a"), w.path("b")).unwrap();
        w.stat("a");
        fs::write(w.path("b"), b"new bytes").unwrap();
        for name in ["a", "b"] {
            w.read(name);
            w.stat(name);
        }
        w.saw("remove", fs::remove_file(w.path("a")));
        w.stat("b");
    }));
    all.extend(fresh_and_at_rest("an append by one name shows under all", |w, make| {
        make("a", b"old");
        fs::hard_link(w.path("a"), w.path("b")).unwrap();
        let reader = File::open(w.path("a")).unwrap();
        w.saw(
            "append",
            File::options()
                .append(true)
                .open(w.path("b"))
                .and_then(|mut f| std::io::Write::write(&mut f, b"er")),
        );
        for name in ["a", "b"] {
            w.read(name);
            w.stat(name);
        }
        w.saw("size", reader.metadata().map(|found| found.len()));
    }));
    all.extend(fresh_and_at_rest("attributes are of the file and not of the name", |w, make| {
        make("a", b"x");
        fs::hard_link(w.path("a"), w.path("b")).unwrap();
        fs::set_permissions(w.path("a"), fs::Permissions::from_mode(0o604)).unwrap();
        w.saw("set", rustix::fs::setxattr(w.path("b"), "user.k", b"v", XattrFlags::empty()));
        w.stat("b");
        let mut value = [0; 8];
        w.saw("get", rustix::fs::getxattr(w.path("a"), "user.k", &mut value).map(|n| value[..n].to_vec()));
        w.saw("replace", rustix::fs::setxattr(w.path("a"), "user.k", b"w", XattrFlags::CREATE));
        w.saw("remove", rustix::fs::removexattr(w.path("a"), "user.none"));
    }));
    all.extend(fresh_and_at_rest("times that were set stay", |w, make| {
        make("f", b"x");
        let time = |s| Timespec { tv_sec: s, tv_nsec: 987_654_321 };
        let times = Timestamps { last_access: time(1), last_modification: time(-2) };
        w.saw("set", utimensat(CWD, w.path("f"), &times, AtFlags::empty()));
        let shown = |name: &str| {
            fs::metadata(w.path(name)).map(|m| (m.mtime(), m.mtime_nsec(), m.atime(), m.atime_nsec()))
        };
        w.saw("times", shown("f"));
        fs::rename(w.path("f"), w.path("g")).unwrap();
        w.saw("times", shown("g"));
    }));
    all.extend([
        scenario("a directory moved below itself", |w| {
            fs::create_dir_all(w.path("a/b")).unwrap();
            w.saw("rename", fs::rename(w.path("a"), w.path("a/b/c")));
            w.saw("exchange", renameat_with(CWD, w.path("a"), CWD, w.path("a/b"), RenameFlags::EXCHANGE));
            w.list("a");
        }),
        scenario("rename to the same name", |w| {
            w.put("f", b"x");
            fs::hard_link(w.path("f"), w.path("g")).unwrap();
            w.saw("rename", fs::rename(w.path("f"), w.path("f")));
            w.saw("rename", fs::rename(w.path("f"), w.path("g")));
            w.list("");
            w.stat("f");
        }),
        scenario("unlink and rmdir refuse each other's things", |w| {
            w.put("f", b"");
            fs::create_dir(w.path("d")).unwrap();
            symlink("d", w.path("s")).unwrap();
            let remove = |name: &str, flags| w.saw(name, rustix::fs::unlinkat(CWD, w.path(name), flags));
            remove("f", AtFlags::REMOVEDIR);
            remove("s", AtFlags::REMOVEDIR);
            remove("nothing", AtFlags::empty());
            remove("f", AtFlags::empty());
            remove("d", AtFlags::REMOVEDIR);
            w.list("");
        }),
        scenario("a directory that is not empty stays", |w| {
            fs::create_dir(w.path("d")).unwrap();
            w.put("d/f", b"");
            w.saw("rmdir", fs::remove_dir(w.path("d")));
            w.list("d");
        }),
        scenario("links of what has none", |w| {
            fs::create_dir(w.path("d")).unwrap();
            w.saw("directory", fs::hard_link(w.path("d"), w.path("e")));
            w.saw("nothing", fs::hard_link(w.path("f"), w.path("e")));
            w.put("f", b"");
            w.put("g", b"");
            w.saw("taken", fs::hard_link(w.path("f"), w.path("g")));
            let open = File::open(w.path("f")).unwrap();
            fs::remove_file(w.path("f")).unwrap();
            let again = format!("/proc/self/fd/{}", open.as_raw_fd());
            w.saw("unlinked", linkat(CWD, again, CWD, w.path("back"), AtFlags::SYMLINK_FOLLOW));
            w.list("");
        }),
        scenario("symlinks are kept as given", |w| {
            for target in ["a/../b//c/", &"t".repeat(4095)] {
                w.saw("make", symlink(target, w.path("s")));
                w.saw("read", fs::read_link(w.path("s")).map(|found| found == Path::new(target)));
                fs::remove_file(w.path("s")).unwrap();
            }
            w.saw("empty", symlink("", w.path("s")));
            w.saw("file", fs::read_link(w.path("")));
        }),
        scenario("a hard link of a symlink", |w| {
            symlink("nowhere", w.path("s")).unwrap();
            w.saw("link", linkat(CWD, w.path("s"), CWD, w.path("t"), AtFlags::empty()));
            w.stat("s");
            fs::remove_file(w.path("s")).unwrap();
            w.stat("t");
        }),
        scenario("mkdir where something is", |w| {
            w.put("f", b"");
            symlink("nowhere", w.path("s")).unwrap();
            for name in ["f", "s", "", "f/x", "none/x"] {
                w.saw(name, fs::create_dir(w.path(name)));
            }
        }),
        scenario("a directory counts its directories", |w| {
            let links = |w: &World| fs::metadata(w.path("d")).unwrap().nlink();
            fs::create_dir_all(w.path("d/a")).unwrap();
            fs::create_dir(w.path("d/b")).unwrap();
            w.put("d/f", b"");
            w.note("links", links(w));
            fs::rename(w.path("d/a"), w.path("moved")).unwrap();
            fs::remove_dir(w.path("d/b")).unwrap();
            w.note("links", links(w));
        }),
        scenario("sgid of a directory is inherited", |w| {
            fs::create_dir(w.path("d")).unwrap();
            fs::set_permissions(w.path("d"), fs::Permissions::from_mode(0o2755)).unwrap();
            fs::create_dir(w.path("d/below")).unwrap();
            w.stat("d");
            w.stat("d/below");
        }),
        scenario("a listing while its entries are renamed", |w| {
            // More files than one answer of getdents(2) holds.
            const FILES: usize = 1500;
            (0..FILES).for_each(|i| w.put(&format!("f{i}"), b""));
            let listed = fs::read_dir(w.path("")).unwrap().take(4 * FILES);
            let seen = listed.map(|entry| {
                let path = entry.unwrap().path();
                fs::rename(&path, path.with_extension("bak")).is_ok()
            });
            w.note("ends", seen.count() < 4 * FILES);
            w.note("there", fs::read_dir(w.path("")).unwrap().count());
        }),
        scenario("rewinding a listing", |w| {
            w.put("a", b"");
            let mut directory = rustix::fs::Dir::read_from(File::open(w.path("")).unwrap()).unwrap();
            w.note("entries", directory.by_ref().count());
            w.put("b", b"");
            directory.rewind();
            w.note("entries", directory.by_ref().count());
        }),
        scenario("a tree is removed while it is listed", |w| {
            for i in 0..200 {
                fs::create_dir_all(w.path(&format!("d/{}", i % 20))).unwrap();
                w.put(&format!("d/{}/{i}", i % 20), b"x");
            }
            w.saw("remove", fs::remove_dir_all(w.path("d")));
            w.stat("d");
        }),
        scenario("the mtime of a directory moves with its entries", |w| {
            let old = Timespec { tv_sec: 5, tv_nsec: 0 };
            let times = Timestamps { last_access: old, last_modification: old };
            let moves = |what: &str, change: &dyn Fn()| {
                utimensat(CWD, w.path("d"), &times, AtFlags::empty()).unwrap();
                change();
                w.note(what, fs::metadata(w.path("d")).unwrap().mtime() != 5);
            };
            fs::create_dir(w.path("d")).unwrap();
            moves("create", &|| w.put("d/f", b""));
            moves("write", &|| w.put("d/f", b"x"));
            moves("chmod", &|| {
                fs::set_permissions(w.path("d/f"), fs::Permissions::from_mode(0o600)).unwrap()
            });
            moves("rename", &|| fs::rename(w.path("d/f"), w.path("d/g")).unwrap());
            moves("unlink", &|| fs::remove_file(w.path("d/g")).unwrap());
        }),
        scenario("a regular file by mknod", |w| {
            let make = |w: &World| {
                w.saw(
                    "make",
                    mknodat(CWD, w.path("f"), FileType::RegularFile, Mode::from_raw_mode(0o640), 0),
                );
            };
            make(w);
            w.rest("f");
            make(w);
            w.list("");
            w.stat("f");
            w.saw("write", fs::write(w.path("f"), b"bytes"));
            w.read("f");
        }),
        scenario("all bits of the mode of a pipe", |w| {
            w.saw("make", mknodat(CWD, w.path("p"), FileType::Fifo, Mode::empty(), 0));
            for mode in [0o7755, 0o6644, 0o2710] {
                fs::set_permissions(w.path("p"), fs::Permissions::from_mode(mode)).unwrap();
                w.stat("p");
                w.saw("chown", std::os::unix::fs::chown(w.path("p"), Some(12), Some(34)));
                w.stat("p");
            }
        }),
        scenario("extended attributes with both flags, and without a name", |w| {
            w.put("f", b"x");
            let set = |name: &str, flags| w.saw(name, rustix::fs::setxattr(w.path("f"), name, b"v", flags));
            set("user.k", XattrFlags::CREATE | XattrFlags::REPLACE);
            set("user.k", XattrFlags::CREATE);
            set("user.k", XattrFlags::CREATE | XattrFlags::REPLACE);
            set("user.", XattrFlags::empty());
        }),
        otherwise("S-mode", "sgid on a file", |w| {
            w.put("f", b"x");
            fs::set_permissions(w.path("f"), fs::Permissions::from_mode(0o2755)).unwrap();
            w.stat("f");
        }),
    ]);
    all
}
