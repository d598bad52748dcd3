//! Does the file system agree with 300 lines of plain Rust?
//!
//! Owns: random sequences of calls, crashes among them, applied to the namespace and to `reference`, and the
//! comparison of everything visible after each. Does not own: the kernel's part (the mount suite).
#![expect(clippy::unwrap_used, reason = "a broken belief of a test is its failure")]

mod journal;
mod reference;
mod restart;
mod snapshot;
mod telling;
mod whole;

use proptest::prelude::*;
use reference::{Content, Id, ROOT, Reference};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidemark_namespace::{
    Attr, Caller, FileState, FsError, Kind, Looked, Namespace, NamespaceSettings, NotSealable, ObjectCopy,
    OpenFile, OpenOutcome, RENAME_EXCHANGE, RENAME_NOREPLACE, SealPin, SetAttr, SetTime, Special,
};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{Backing, MediumChoice, Tier1, Tier1Settings};

/// Start of the suite's times, far in the future. If the kernel's clock would show in an mtime, the time of the open shows instead.
const EPOCH_NS: i64 = 4_000_000_000_000_000_000;
const O_RDONLY: i32 = 0;
const O_RDWR: i32 = 2;
const O_EXCL: i32 = 0o200;
const O_TRUNC: i32 = 0o1000;

/// Special file that `Op::Special` makes, by its name's number.
const SPECIALS: [Special; 4] =
    [Special::Pipe, Special::Socket, Special::CharacterDevice(0x103), Special::BlockDevice(u32::MAX)];

/// A call. Nodes and handles are chosen by an index that wraps around the existing ones.
#[derive(Debug, Clone)]
enum Op {
    Create { dir: usize, name: usize, exclusive: bool, truncate: bool },
    Open { node: usize, write: bool, truncate: bool },
    Write { handle: usize, offset: u16, bytes: Vec<u8> },
    Append { handle: usize, bytes: Vec<u8> },
    Truncate { node: usize, size: u16 },
    Fsync { handle: usize },
    Close { handle: usize, cut: bool },
    Mkdir { dir: usize, name: usize },
    Symlink { dir: usize, name: usize },
    Special { dir: usize, name: usize },
    Link { node: usize, dir: usize, name: usize },
    Unlink { dir: usize, name: usize },
    Rmdir { dir: usize, name: usize },
    Rename { dir: usize, name: usize, to_dir: usize, to_name: usize, flags: u32 },
    SetXattr { node: usize, name: usize, value: Vec<u8> },
    RemoveXattr { node: usize, name: usize },
    Utimens { node: usize, ns: u32 },
    Chmod { node: usize, mode: u32 },
    Seal { node: usize },
    VoidedSeal { node: usize },
    Pin { node: usize },
    Unpin,
    Reclaim { node: usize },
    Restore { node: usize },
    Crash,
    TakeOver,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (i, name) = (0..64_usize, 0..4_usize);
    let bytes = proptest::collection::vec(any::<u8>(), 1..64);
    let two = (i.clone(), name.clone());
    let op = prop_oneof![
        6 => (two.clone(), any::<bool>(), any::<bool>())
            .prop_map(|((dir, name), exclusive, truncate)| Op::Create { dir, name, exclusive, truncate }),
        5 => (i.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(node, write, truncate)| Op::Open { node, write, truncate }),
        5 => (i.clone(), 0..9000_u16, bytes.clone())
            .prop_map(|(handle, offset, bytes)| Op::Write { handle, offset, bytes }),
        3 => (i.clone(), bytes.clone()).prop_map(|(handle, bytes)| Op::Append { handle, bytes }),
        3 => (i.clone(), 0..9000_u16).prop_map(|(node, size)| Op::Truncate { node, size }),
        1 => i.clone().prop_map(|handle| Op::Fsync { handle }),
        8 => (i.clone(), prop::bool::weighted(0.15)).prop_map(|(handle, cut)| Op::Close { handle, cut }),
        4 => two.clone().prop_map(|(dir, name)| Op::Mkdir { dir, name }),
        1 => two.clone().prop_map(|(dir, name)| Op::Symlink { dir, name }),
        1 => two.clone().prop_map(|(dir, name)| Op::Special { dir, name }),
        2 => (i.clone(), two.clone()).prop_map(|(node, (dir, name))| Op::Link { node, dir, name }),
        3 => two.clone().prop_map(|(dir, name)| Op::Unlink { dir, name }),
        2 => two.clone().prop_map(|(dir, name)| Op::Rmdir { dir, name }),
        5 => (two.clone(), two, 0..3_u32)
            .prop_map(|((dir, name), (to_dir, to_name), flags)| Op::Rename { dir, name, to_dir, to_name, flags }),
        1 => (i.clone(), name.clone(), bytes).prop_map(|(node, name, value)| Op::SetXattr { node, name, value }),
        1 => (i.clone(), name).prop_map(|(node, name)| Op::RemoveXattr { node, name }),
        1 => (i.clone(), any::<u32>()).prop_map(|(node, ns)| Op::Utimens { node, ns }),
        1 => (i.clone(), 0..0o1000_u32).prop_map(|(node, mode)| Op::Chmod { node, mode }),
        5 => i.clone().prop_map(|node| Op::Seal { node }),
        1 => i.clone().prop_map(|node| Op::VoidedSeal { node }),
        2 => i.clone().prop_map(|node| Op::Pin { node }),
        1 => Just(Op::Unpin),
        3 => i.clone().prop_map(|node| Op::Reclaim { node }),
        2 => i.prop_map(|node| Op::Restore { node }),
        1 => Just(Op::Crash),
        2 => Just(Op::TakeOver),
    ];
    proptest::collection::vec(op, 1..60)
}

struct Open {
    id: Id,
    file: OpenFile,
}

struct World {
    tier1: Arc<Tier1>,
    settings: NamespaceSettings,
    namespace: Arc<Namespace>,
    reference: Reference,
    handles: Vec<Open>,
    pins: Vec<(Id, SealPin, Vec<u8>)>,
    now_ns: i64,
}

fn name(index: usize) -> Vec<u8> {
    [&b"a"[..], b"b\xff", b"c c", b"d"][index % 4].to_vec()
}

impl World {
    fn new(tier1: Arc<Tier1>) -> Self {
        let mut settings = NamespaceSettings::new(Incarnation(7));
        settings.root_mode = 0o755;
        settings.journal_bytes = Some(256 << 10);
        let namespace = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
        let (reference, handles, pins) = (Reference::new(), Vec::new(), Vec::new());
        Self { tier1, settings, namespace, reference, handles, pins, now_ns: EPOCH_NS }
    }

    fn caller(&self) -> Caller {
        Caller { uid: 1, gid: 2, pid: 0, now_ns: self.now_ns, request: 0 }
    }

    /// Verifies a file from before the namespace was rebuilt, as its first open would.
    fn verify(&self, node: u64) {
        if self.namespace.seals().is_unverified(node) {
            let view = self.namespace.nodes().view(node).expect("a sealed file with a name");
            self.namespace.seals().verified(view.file, view.sealed().expect("only seals are verified"));
            assert!(!self.namespace.seals().is_unverified(node));
        }
    }

    fn directory(&self, index: usize) -> (u64, Id) {
        let found: Vec<_> =
            self.reference.paths().into_iter().filter(|(_, id)| self.reference.is_directory(*id)).collect();
        let (path, id) = &found[index % found.len()];
        (self.namespace.nodes().node_at(path).unwrap(), *id)
    }

    fn any_node(&self, index: usize) -> (Vec<u8>, u64, Id) {
        let found = self.reference.paths();
        let (path, id) = &found[index % found.len()];
        (path.clone(), self.namespace.nodes().node_at(path).unwrap(), *id)
    }

    fn file(&self, index: usize) -> Option<(Vec<u8>, u64, Id)> {
        let is_file = |id: &Id| matches!(self.reference.nodes[id].content, Content::File(_));
        let found: Vec<_> = self.reference.paths().into_iter().filter(|(_, id)| is_file(id)).collect();
        let (path, id) = found.get(index % found.len().max(1))?;
        Some((path.clone(), self.namespace.nodes().node_at(path).unwrap(), *id))
    }

    fn opens(&self, id: Id) -> usize {
        self.handles.iter().filter(|open| open.id == id).count()
    }

    fn writers(&self, id: Id) -> usize {
        self.handles.iter().filter(|open| open.id == id && open.file.writable).count()
    }

    fn pinned(&self, id: Id) -> bool {
        self.pins.iter().any(|(pinned, _, _)| *pinned == id)
    }

    /// Opens as the kernel does. Fetches a cold file first, and looks the path up again after ESTALE.
    fn open(&mut self, path: &[u8], node: u64, id: Id, flags: i32, truncate: bool) {
        let modifies = flags != O_RDONLY || truncate;
        let fresh = self.reference.nodes[&id].sealed && truncate && !self.reference.bytes(id).is_empty();
        let forks =
            modifies && (fresh || self.pinned(id)) && self.opens(id) > 0 && !self.reference.nodes[&id].cold;
        self.verify(node);
        let mut opened = self.namespace.open(&self.caller(), node, flags);
        if let Ok(OpenOutcome::Cold(cold)) = &opened {
            assert!(self.reference.nodes[&id].cold, "cold, though its bytes should be here");
            assert_eq!(cold.size_bytes, self.reference.bytes(id).len() as u64);
            self.restore(node, id);
            opened = self.namespace.finish_cold_open(&self.caller(), node, flags).map(OpenOutcome::Ready);
        }
        let mut target = id;
        if forks {
            assert_eq!(opened.err(), None.or(Some(FsError::Stale)), "old handles must keep the old bytes");
            let again;
            (again, target) = self.look_up_again(path, node, id);
            opened = self.namespace.open(&self.caller(), again, flags);
            if truncate {
                self.reference.bytes(target).clear();
            }
        }
        let Ok(OpenOutcome::Ready(file)) = opened else { panic!("{opened:?}") };
        if modifies && !forks {
            self.detach_pins(id);
        }
        let node = self.reference.node(target);
        if modifies {
            node.sealed = false;
            node.mtime_ns = None;
            node.cold = false;
        }
        if truncate {
            node.cut &= flags == O_RDONLY;
            self.reference.bytes(target).clear();
            self.reference.node(target).cold = false;
        }
        if self.reference.bytes(target).is_empty() {
            self.reference.node(target).cold = false;
        }
        self.handles.push(Open { id: target, file });
    }

    /// Looks a path up as the kernel does after ESTALE, which gives the file's names to a new node. Nothing had changed before.
    fn look_up_again(&mut self, path: &[u8], node: u64, id: Id) -> (u64, Id) {
        assert_eq!(self.namespace.nodes().node_at(path), Some(node), "what failed has changed nothing");
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap();
        let directory = &path[..path.len() - name.len()];
        let parent = self.namespace.nodes().node_at(directory).unwrap();
        let caller = self.caller();
        let looked = self.namespace.lookup_by(caller.pid, parent, name).unwrap();
        assert!(matches!(looked, Looked::Begun), "{looked:?}");
        let again = self.namespace.lookup_anew(&caller, parent, name).unwrap().node;
        self.namespace.forget(again, 1);
        assert_ne!(again, node);
        let old = self.reference.nodes[&id].clone();
        let target = self.reference.make(old.content, old.mode, self.now_ns, old.ino);
        self.reference.node(target).xattrs = old.xattrs;
        self.reference.move_names(id, target);
        (again, target)
    }

    /// Detaches a file's pins, which keep its old bytes, because the file gets new ones.
    fn detach_pins(&mut self, id: Id) {
        self.pins.iter_mut().filter(|(pinned, ..)| *pinned == id).for_each(|(pinned, ..)| *pinned = Id::MAX);
    }

    fn restore(&mut self, node: u64, id: Id) {
        let Some(cold) = self.namespace.hosts().cold(node) else { return };
        let bytes = self.reference.bytes(id).clone();
        let backing = self.tier1.create(Some(bytes.len() as u64)).unwrap();
        backing.write_at(&bytes, 0).unwrap();
        self.namespace.hosts().finish_restore(node, cold.file, cold.seal, backing).unwrap();
        self.reference.node(id).cold = false;
    }

    fn seal(&mut self, node: u64, id: Id, voided: bool) {
        let known = &self.reference.nodes[&id];
        let expected = match (self.writers(id) > 0, known.sealed, known.cut, known.cold) {
            (true, ..) => Some(NotSealable::Open),
            (_, true, ..) => Some(NotSealable::Sealed),
            (_, _, true, _) => Some(NotSealable::Cut),
            (_, _, _, true) => Some(NotSealable::Gone),
            _ => None,
        };
        let ticket = self.namespace.seals().begin_seal(node);
        assert_eq!(ticket.as_ref().err().copied(), expected);
        let Ok(ticket) = ticket else { return };
        let chunks: Arc<[Crc64]> = (0..ticket.size_bytes.div_ceil(8 << 20)).map(Crc64).collect();
        if voided {
            let set = SetAttr { size: Some(ticket.size_bytes + 1), ..SetAttr::default() };
            let is_read = self.opens(id) > 0;
            let (namespace, changed) = (&self.namespace, &AtomicBool::new(false));
            // The job gives up once it is told to, and otherwise ends after the change.
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    while !ticket.is_abandoned() && !changed.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    assert_eq!(
                        ticket.is_abandoned(),
                        is_read,
                        "a seal gives way where readers must see the change"
                    );
                    let sealed = || namespace.seals().finish_seal(&ticket, Crc64(1), chunks);
                    assert!(ticket.is_abandoned() || sealed().is_err(), "the bytes have changed");
                    drop(ticket);
                });
                namespace.setattr(&self.caller(), node, &set).unwrap();
                changed.store(true, Ordering::Release);
            });
            self.reference.bytes(id).push(0);
            self.reference.node(id).mtime_ns = Some(self.now_ns);
            return;
        }
        self.namespace.seals().finish_seal(&ticket, Crc64(1), chunks).unwrap();
        self.reference.node(id).sealed = true;
        assert!(self.namespace.seals().begin_seal(node).is_err());
    }

    fn apply(&mut self, op: &Op) {
        self.now_ns += 1000;
        let (caller, now) = (self.caller(), self.now_ns);
        match op {
            Op::Create { dir, name: n, exclusive, truncate } => {
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let flags =
                    O_RDWR | if *exclusive { O_EXCL } else { 0 } | if *truncate { O_TRUNC } else { 0 };
                if let Ok(existing) = self.reference.child(id, &n) {
                    if *exclusive {
                        let made = self.namespace.create(&caller, node, &n, 0o640, flags);
                        assert_eq!(made.err(), Some(FsError::Exists));
                    } else if let Content::File(_) = self.reference.nodes[&existing].content {
                        let found = self.namespace.lookup(node, &n).unwrap();
                        self.namespace.forget(found.node, 1);
                        let path = self.namespace.nodes().path_of(found.node).unwrap();
                        self.open(&path, found.node, existing, O_RDWR | flags & O_TRUNC, *truncate);
                    }
                    return;
                }
                let made = self.namespace.create(&caller, node, &n, 0o640, flags);
                let (attr, file) = made.unwrap_or_else(|error| {
                    panic!("{error} with {:?} and {:?}", self.namespace.room().statfs(), self.tier1.usage())
                });
                self.namespace.forget(attr.node, 1);
                let made = self.reference.make(Content::File(Vec::new()), 0o640, now, attr.ino);
                self.reference.node(made).mtime_ns = None;
                self.reference.insert(id, &n, made, now);
                self.handles.push(Open { id: made, file });
            }
            Op::Open { node, write, truncate } => {
                let Some((path, node, id)) = self.file(*node) else { return };
                let truncate = *truncate && *write;
                let flags = if *write { O_RDWR } else { O_RDONLY } | if truncate { O_TRUNC } else { 0 };
                self.open(&path, node, id, flags, truncate);
            }
            Op::Write { handle, offset, bytes } => self.write(*handle, Some(usize::from(*offset)), bytes),
            Op::Append { handle, bytes } => self.write(*handle, None, bytes),
            Op::Truncate { node, size } => {
                let Some((path, node, mut id)) = self.file(*node) else { return };
                let set = SetAttr { size: Some(u64::from(*size)), ..SetAttr::default() };
                let empty = self.reference.bytes(id).is_empty();
                let size = usize::from(*size);
                let mut changed = self.namespace.setattr(&caller, node, &set);
                if changed == Err(FsError::Stale) {
                    assert!(self.opens(id) > 0 && (self.pinned(id) || size == 0));
                    let again;
                    (again, id) = self.look_up_again(&path, node, id);
                    changed = self.namespace.setattr(&caller, again, &set);
                }
                match changed {
                    Ok(attr) => {
                        assert_eq!(attr.size_bytes, size as u64);
                        self.detach_pins(id);
                        self.reference.bytes(id).resize(size, 0);
                        let known = self.reference.node(id);
                        (known.sealed, known.cold, known.mtime_ns) = (false, false, Some(now));
                        if self.writers(id) > 0 {
                            self.reference.node(id).mtime_ns = None;
                        }
                    }
                    Err(error) => {
                        assert_eq!(error, FsError::Busy);
                        assert!(self.reference.nodes[&id].cold && size > 0 && !empty);
                    }
                }
            }
            Op::Fsync { handle } => {
                if let Some(open) = self.handles.get(*handle % self.handles.len().max(1)) {
                    self.namespace.handles().fsync(open.file.fh).unwrap();
                }
            }
            Op::Close { handle, cut } => {
                if self.handles.is_empty() {
                    return;
                }
                let open = self.handles.swap_remove(*handle % self.handles.len());
                self.namespace.handles().flush(open.file.fh, &caller, *cut).unwrap();
                self.namespace.handles().release(open.file.fh).unwrap();
                self.forget_nameless(open.file.node);
                assert_eq!(self.namespace.handles().release(open.file.fh), Err(FsError::BadHandle));
                self.reference.node(open.id).cut |= *cut && open.file.writable;
            }
            Op::Mkdir { dir, name: n } => {
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let made = self.namespace.names().mkdir(&caller, node, &n, 0o750);
                assert_eq!(made.is_ok(), self.reference.child(id, &n).is_err(), "{made:?}");
                if let Ok(attr) = made {
                    self.namespace.forget(attr.node, 1);
                    let made = self.reference.make(Content::Directory(BTreeMap::new()), 0o750, now, attr.ino);
                    self.reference.insert(id, &n, made, now);
                }
            }
            Op::Symlink { dir, name: n } => {
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let made = self.namespace.names().symlink(&caller, node, &n, b"../there");
                assert_eq!(made.is_ok(), self.reference.child(id, &n).is_err(), "{made:?}");
                if let Ok(attr) = made {
                    self.namespace.forget(attr.node, 1);
                    let made =
                        self.reference.make(Content::Symlink(b"../there".to_vec()), 0o777, now, attr.ino);
                    self.reference.insert(id, &n, made, now);
                }
            }
            Op::Special { dir, name: n } => {
                let special = SPECIALS[*n % SPECIALS.len()];
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let made = self.namespace.names().make_special(&caller, node, &n, 0o640, special);
                assert_eq!(made.is_ok(), self.reference.child(id, &n).is_err(), "{made:?}");
                if let Ok(attr) = made {
                    self.namespace.forget(attr.node, 1);
                    let made = self.reference.make(Content::Special(special), 0o640, now, attr.ino);
                    self.reference.insert(id, &n, made, now);
                }
            }
            Op::Link { node, dir, name: n } => {
                let ((_, node, id), (dir, dir_id), n) =
                    (self.any_node(*node), self.directory(*dir), name(*n));
                let linked = self.namespace.names().link(&caller, node, dir, &n);
                if let Ok(attr) = linked {
                    self.namespace.forget(attr.node, 1);
                }
                assert_eq!(linked.map(|_| ()), self.reference.link(id, dir_id, &n, now));
            }
            Op::Unlink { dir, name: n } => {
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let known = self.namespace.lookup(node, &n);
                assert_eq!(
                    self.namespace.names().unlink(&caller, node, &n),
                    self.reference.unlink(id, &n, now)
                );
                self.forget(known);
            }
            Op::Rmdir { dir, name: n } => {
                let ((node, id), n) = (self.directory(*dir), name(*n));
                let known = self.namespace.lookup(node, &n);
                assert_eq!(
                    self.namespace.names().rmdir(&caller, node, &n),
                    self.reference.rmdir(id, &n, now)
                );
                self.forget(known);
            }
            Op::Rename { dir, name: n, to_dir, to_name, flags } => {
                let ((node, id), (to, to_id)) = (self.directory(*dir), self.directory(*to_dir));
                let (n, to_n) = (name(*n), name(*to_name));
                let known = self.namespace.lookup(to, &to_n);
                let renamed = self.namespace.names().rename(&caller, (node, &n), (to, &to_n), *flags);
                self.forget(known);
                let expected = match *flags {
                    RENAME_EXCHANGE => self.reference.exchange((id, &n), (to_id, &to_n), now),
                    flags => self.reference.rename((id, &n), (to_id, &to_n), flags == RENAME_NOREPLACE, now),
                };
                assert_eq!(renamed, expected);
            }
            Op::SetXattr { node, name: n, value } => {
                let (_, node, id) = self.any_node(*node);
                let n = [&b"user."[..], &name(*n)].concat();
                self.namespace.xattrs().setxattr(node, &n, value, 0, &self.caller()).unwrap();
                self.reference.node(id).xattrs.insert(n, value.clone());
            }
            Op::RemoveXattr { node, name: n } => {
                let (_, node, id) = self.any_node(*node);
                let n = [&b"user."[..], &name(*n)].concat();
                let removed = self.reference.node(id).xattrs.remove(&n);
                let expected = removed.map(|_| ()).ok_or(FsError::NoAttribute);
                assert_eq!(self.namespace.xattrs().removexattr(node, &n, &self.caller()), expected);
            }
            Op::Utimens { node, ns } => {
                let (_, node, id) = self.any_node(*node);
                let time = i64::from(*ns) * 1_000_003;
                let set = SetAttr { mtime: Some(SetTime::At(time)), ..SetAttr::default() };
                assert_eq!(self.namespace.setattr(&caller, node, &set).unwrap().mtime_ns, time);
                self.reference.node(id).mtime_ns = Some(time);
            }
            Op::Chmod { node, mode } => {
                let (_, node, id) = self.any_node(*node);
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                self.namespace.setattr(&caller, node, &set).unwrap();
                self.reference.node(id).mode = *mode;
            }
            Op::Seal { node } | Op::VoidedSeal { node } => {
                let Some((_, node, id)) = self.file(*node) else { return };
                self.seal(node, id, matches!(op, Op::VoidedSeal { .. }));
            }
            Op::Pin { node } => {
                let Some((_, node, id)) = self.file(*node) else { return };
                let view = self.namespace.nodes().view(node).unwrap();
                let FileState::Sealed { seal, .. } = view.state else { return };
                let pin = self.namespace.seals().pin_seal(view.file, seal);
                assert_eq!(pin.is_some(), !self.reference.nodes[&id].cold);
                if let Some(pin) = pin {
                    let bytes = self.reference.bytes(id).clone();
                    self.pins.push((id, pin, bytes));
                }
            }
            Op::Unpin => drop(self.pins.pop()),
            Op::Reclaim { node } => {
                let Some((_, node, id)) = self.file(*node) else { return };
                let view = self.namespace.nodes().view(node).unwrap();
                if let FileState::Sealed { seal, size_bytes, .. } = view.state {
                    let object = ObjectCopy { key: "k".into(), size_bytes, encoding: None };
                    assert!(self.namespace.hosts().note_object(view.file, seal, object));
                }
                let known = &self.reference.nodes[&id];
                let expected = known.sealed && self.opens(id) == 0 && !self.pinned(id);
                assert_eq!(self.namespace.room().reclaim(node).is_ok(), expected);
                if expected {
                    self.reference.node(id).cold = true;
                }
            }
            Op::Restore { node } => {
                let Some((_, node, id)) = self.file(*node) else { return };
                self.restore(node, id);
            }
            Op::Crash => self.crash(),
            Op::TakeOver => self.take_over(),
        }
    }

    /// Forgets a node as the kernel does, which looks a node up before it takes the name, and forgets it afterwards.
    fn forget(&self, known: Result<Attr, FsError>) {
        if let Ok(known) = known {
            self.namespace.forget(known.node, 1);
        }
    }

    /// Forgets an inode without a name after its last close, as the kernel does.
    fn forget_nameless(&self, node: u64) {
        if self.namespace.getattr(node).is_ok_and(|attr| attr.nlink == 0) {
            self.namespace.forget(node, 1);
        }
    }

    fn write(&mut self, handle: usize, offset: Option<usize>, bytes: &[u8]) {
        let Some(open) = self.handles.get(handle % self.handles.len().max(1)) else { return };
        if !open.file.writable {
            return;
        }
        let id = open.id;
        let Content::File(content) = &mut self.reference.node(id).content else {
            unreachable!("handles are of files")
        };
        let offset = offset.unwrap_or(content.len());
        content.resize(content.len().max(offset + bytes.len()), 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        let backing = &self.handles[handle % self.handles.len()].file.backing;
        assert_eq!(backing.write_at(bytes, offset as u64).unwrap(), bytes.len());
        self.reference.node(id).mtime_ns = None;
    }

    /// Checks that everything visible is as the reference has it.
    fn compare(&mut self) {
        let open: Vec<Id> = self.handles.iter().map(|open| open.id).collect();
        self.reference.sweep(&open);
        assert_eq!(
            self.namespace.room().statfs().nodes,
            self.reference.nodes.len() as u64,
            "a node leaked or is gone"
        );
        for (path, id) in self.reference.paths() {
            let node = self.namespace.nodes().node_at(&path).unwrap();
            let attr = self.namespace.getattr(node).unwrap();
            let expected = self.reference.nodes[&id].clone();
            assert_eq!((attr.mode, attr.ino), (expected.mode, expected.ino), "{path:?}");
            if let Some(mtime_ns) = expected.mtime_ns {
                assert_eq!(attr.mtime_ns, mtime_ns, "mtime of {path:?}");
            }
            let names = self.namespace.xattrs().listxattr(node).unwrap();
            assert_eq!(names, expected.xattrs.keys().cloned().collect::<Vec<_>>());
            for (name, value) in &expected.xattrs {
                assert_eq!(&self.namespace.xattrs().getxattr(node, name).unwrap(), value);
            }
            match &expected.content {
                Content::Directory(entries) => {
                    let mut listed: Vec<_> = self
                        .namespace
                        .names()
                        .readdir(node, 0)
                        .unwrap()
                        .into_iter()
                        .map(|entry| entry.name)
                        .collect();
                    listed.sort();
                    assert_eq!(listed, entries.keys().cloned().collect::<Vec<_>>());
                    let below = entries.values().filter(|id| self.reference.is_directory(**id)).count();
                    assert_eq!(attr.nlink as usize, 2 + below);
                    assert_eq!(attr.kind, Kind::Directory);
                }
                Content::Symlink(target) => {
                    assert_eq!(&self.namespace.names().readlink(node).unwrap(), target)
                }
                Content::Special(special) => {
                    assert_eq!(attr.kind, Kind::Special(*special));
                    assert_eq!(attr.nlink as usize, self.reference.links(id));
                    assert_eq!(attr.size_bytes, 0);
                }
                Content::File(bytes) => {
                    assert_eq!(attr.nlink as usize, self.reference.links(id));
                    assert_eq!(attr.size_bytes, bytes.len() as u64, "size of {path:?}");
                    self.compare_state(node, id);
                    if !expected.cold {
                        self.verify(node);
                        let OpenOutcome::Ready(open) =
                            self.namespace.open(&self.caller(), node, O_RDONLY).unwrap()
                        else {
                            panic!("cold, though its bytes should be here")
                        };
                        assert_eq!(&read(&open.backing), bytes, "bytes of {path:?}");
                        self.namespace.handles().release(open.fh).unwrap();
                    }
                }
            }
        }
        for open in &self.handles {
            assert_eq!(&read(&open.file.backing), self.reference.bytes(open.id), "bytes of an open handle");
        }
        for (_, pin, bytes) in &self.pins {
            assert_eq!(&read(&pin.backing), bytes, "a pinned seal's bytes changed");
        }
    }

    fn compare_state(&self, node: u64, id: Id) {
        let known = &self.reference.nodes[&id];
        let view = self.namespace.nodes().view(node).unwrap();
        assert_eq!(view.host, !known.cold, "where the bytes are");
        let writers = self.writers(id);
        match view.state {
            FileState::Open { writers: seen } => assert_eq!(seen as usize, writers),
            FileState::Sealed { .. } => assert!(known.sealed && writers == 0),
            FileState::Cut => assert!(known.cut && !known.sealed && writers == 0),
            FileState::Closed => assert!(!known.cut && !known.sealed && writers == 0),
            FileState::Mapped => panic!("nothing is mapped here"),
        }
    }
}

fn read(backing: &Backing) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(backing.stat().unwrap().size_bytes).unwrap()];
    let mut done = 0;
    while done < bytes.len() {
        let read = backing.read_at(&mut bytes[done..], done as u64).unwrap();
        assert!(read > 0);
        done += read;
    }
    bytes
}

fn tier1(folder: &std::path::Path) -> Arc<Tier1> {
    let medium = MediumChoice::Directory(folder.to_path_buf());
    Tier1::open(Tier1Settings { size_bytes: 128 << 20, ballast: false, medium }).unwrap()
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("tidemark-model-").tempdir_in("/dev/shm").unwrap()
}

#[test]
fn the_namespace_agrees_with_the_reference_after_every_call() {
    let folder = folder();
    let tier1 = tier1(folder.path());
    let config = ProptestConfig {
        cases: 300,
        max_shrink_iters: 2000,
        failure_persistence: None,
        ..Default::default()
    };
    proptest!(config, |(ops in ops())| {
        let mut world = World::new(Arc::clone(&tier1));
        for op in &ops {
            world.apply(op);
            world.compare();
        }
        world.apply(&Op::Crash);
        world.compare();
        assert!(world.reference.is_directory(ROOT));
    });
}
