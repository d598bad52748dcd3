//! The judge of histories: whether the answers that clients got could have come from one tree, one call after the other.
//!
//! Owns: the words of a history, the correct tree, the search for an order (Wing and Gong's, with Lowe's memory of what was tried).
//! Does not own: making the calls, the simulated clock, anything of the system under test.
//!
//! An order is right if each call happens at one moment between its beginning and its end, and its answer is right at that moment.
//! Paths are freer, because POSIX looks up a path's directories one after the other, and they may be moved or removed meanwhile.
//! So when a name goes away, each call at work that could have passed through it keeps what the name meant, and may go on from
//! there. Its last step still happens at one moment, in a directory to which its path led since it began. A link's source is
//! looked up to its end in this way, because a file is linked and not a name. `Paths::Whole` takes this freedom back.
//!
//! Three more answers are open on purpose. `Stale` is always right. Where several refusals hold, each of them is right. A call
//! without an answer happens once, at any time since it began, or never.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

/// Most configurations that one search makes: some fifteen seconds if optimised. A history of 200 calls made at most 30,000 in a
/// hundred tries, with up to a tenth of its calls without an answer. With a fifth of them, two of a hundred made a million.
pub(crate) const CONFIGURATIONS_MAX: usize = 200_000;
/// Calls shown of an order, its last ones. The fault is near its end.
const STORY_MAX: usize = 40;
const ROOT: u64 = 0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Node {
    File(u64),
    Directory(u64),
}

/// A call and its arguments. Paths have no leading slash, and "" is the root, which always exists. `Create` is `open` with `O_CREAT`;
/// `file` and `directory` are what it and `Mkdir` make, if they make something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Look { path: String },
    Create { path: String, exclusive: bool, file: u64 },
    Mkdir { path: String, directory: u64 },
    Unlink { path: String },
    Rmdir { path: String },
    Rename { from: String, to: String, no_replace: bool },
    Link { from: String, to: String },
    List { path: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errno {
    NotFound,
    Exists,
    NotDirectory,
    IsDirectory,
    NotEmpty,
    /// `EINVAL`: a directory was to be moved into itself.
    Loop,
    /// `ESTALE`: the caller's path went away under it.
    Stale,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Done,
    /// The node of the name, or the file that `Create` opened.
    Is(Node),
    Names(BTreeMap<String, Node>),
    /// The call did nothing.
    Refused(Errno),
    /// An I/O error or no answer: the call happens at any moment since it began, or never.
    Unknown,
}

/// A call with its answer. Times are microseconds of the simulated clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) client: String,
    pub(crate) call: Call,
    pub(crate) told: Told,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
}

/// How calls find their paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paths {
    /// At the moment of the last step. Stricter than POSIX.
    Whole,
    /// Directory by directory.
    Stepwise,
}

/// The size of a history in which no fault was found, and of the search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) events: usize,
    /// Most calls at work at once.
    pub(crate) overlap: usize,
    pub(crate) configurations: usize,
    /// Whether the search ended at its limit. If so, the history may be right or wrong.
    pub(crate) gave_up: bool,
}

/// A history that no order explains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// The longest order found, as indices of events.
    pub(crate) order: Vec<usize>,
    /// The tree after it, in words.
    pub(crate) tree: String,
    /// The events of which one had to be next, and none could.
    pub(crate) stuck: Vec<usize>,
    story: String,
}

/// A directory and a name in it.
type Place<'a> = (u64, &'a str);

/// The nodes of places afterwards, in the order in which they change.
type Change<'a> = Vec<(Place<'a>, Option<Node>)>;

type Outcome<'a> = (Answer, Change<'a>);

/// The answer that the tree gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Done,
    Is(Node),
    /// The names in this directory.
    Names(u64),
    Refused(Errno),
    /// A refusal for a reason of the system's choice.
    RefusedSomehow,
}

fn refused<'a>(errno: Errno) -> Outcome<'a> {
    (Answer::Refused(errno), vec![])
}

/// Returns the place that a walk looks up next, or what ends it.
fn next_place<'a>(steps: &[&'a str], depth: usize, node: Node) -> Result<Place<'a>, Option<Errno>> {
    match (steps.get(depth), node) {
        (None, _) => Err(None),
        (Some(_), Node::File(_)) => Err(Some(Errno::NotDirectory)),
        (Some(step), Node::Directory(id)) => Ok((id, step)),
    }
}

/// The correct tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Tree<'a> {
    names: BTreeMap<Place<'a>, Node>,
    /// The parent of each directory but the root.
    parents: BTreeMap<u64, u64>,
}

impl<'a> Tree<'a> {
    fn list(&self, directory: u64) -> impl Iterator<Item = (&'a str, Node)> {
        let from_here = self.names.range((directory, "")..);
        from_here.take_while(move |(place, _)| place.0 == directory).map(|(place, node)| (place.1, *node))
    }

    fn is_alive(&self, directory: u64) -> bool {
        directory == ROOT || self.parents.contains_key(&directory)
    }

    fn is_full(&self, node: Node) -> bool {
        matches!(node, Node::Directory(id) if self.list(id).next().is_some())
    }

    fn is_below(&self, mut directory: u64, above: u64) -> bool {
        while directory != above {
            let Some(parent) = self.parents.get(&directory) else { return false };
            directory = *parent;
        }
        true
    }

    /// Returns the place of a name in the directory to which a walk came.
    fn place(&self, directory: Node, name: &'a str) -> Result<Place<'a>, Answer> {
        match directory {
            Node::File(_) => Err(Answer::Refused(Errno::NotDirectory)),
            Node::Directory(id) if !self.is_alive(id) => Err(Answer::Refused(Errno::NotFound)),
            Node::Directory(_) if name.is_empty() => Err(Answer::RefusedSomehow),
            Node::Directory(id) => Ok((id, name)),
        }
    }

    /// Returns what a call may come to whose walks ended at these nodes.
    fn act(&self, asked: &Asked<'a>, ends: &[Vec<Node>]) -> Vec<Outcome<'a>> {
        let mut found = Vec::new();
        for end in ends[0].iter().copied() {
            let others = ends.get(1).into_iter().flatten().map(|other| self.place(*other, asked.lasts[1]));
            let two = |act: &dyn Fn(Place<'a>) -> Vec<Outcome<'a>>| {
                others.flat_map(|to| to.map_or_else(|answer| vec![(answer, vec![])], act)).collect()
            };
            found.extend(match (asked.call, self.place(end, asked.lasts[0]), end) {
                (Call::Link { .. }, ..) => two(&|to| self.link(end, to)),
                (Call::List { .. }, _, Node::File(_)) => vec![refused(Errno::NotDirectory)],
                (Call::List { .. }, _, Node::Directory(id)) => {
                    let removed = (!self.is_alive(id)).then(|| refused(Errno::NotFound));
                    [(Answer::Names(id), vec![])].into_iter().chain(removed).collect()
                }
                // The root has no name, and a look-up of it has no last step.
                (Call::Look { path }, ..) if path.is_empty() => vec![(Answer::Is(end), vec![])],
                (Call::Rename { no_replace, .. }, from, _) => {
                    let moved = |from| self.names.get(&from).map(|node| (from, *node));
                    let missing = Answer::Refused(Errno::NotFound);
                    let from = from.and_then(|from| moved(from).ok_or(missing));
                    let renamed = two(&|to| from.map_or(vec![], |from| self.rename(from, to, *no_replace)));
                    from.err().map(|answer| (answer, vec![])).into_iter().chain(renamed).collect()
                }
                (_, Err(answer), _) => vec![(answer, vec![])],
                (call, Ok(place), _) => vec![self.act_on(call, place)],
            });
        }
        found
    }

    fn act_on(&self, call: &Call, place: Place<'a>) -> Outcome<'a> {
        match (call, self.names.get(&place).copied()) {
            (Call::Create { file, .. }, None) => {
                let node = Node::File(*file);
                (Answer::Is(node), vec![(place, Some(node))])
            }
            (Call::Mkdir { directory, .. }, None) => {
                (Answer::Done, vec![(place, Some(Node::Directory(*directory)))])
            }
            (_, None) => refused(Errno::NotFound),
            (Call::Create { exclusive: true, .. } | Call::Mkdir { .. }, Some(_)) => refused(Errno::Exists),
            (Call::Create { .. } | Call::Unlink { .. }, Some(Node::Directory(_))) => {
                refused(Errno::IsDirectory)
            }
            (Call::Look { .. } | Call::Create { .. }, Some(node)) => (Answer::Is(node), vec![]),
            (Call::Rmdir { .. }, Some(Node::File(_))) => refused(Errno::NotDirectory),
            (Call::Rmdir { .. }, Some(node)) if self.is_full(node) => refused(Errno::NotEmpty),
            (Call::Unlink { .. } | Call::Rmdir { .. }, Some(_)) => (Answer::Done, vec![(place, None)]),
            (Call::Rename { .. } | Call::Link { .. } | Call::List { .. }, Some(_)) => {
                unreachable!("`act` has its own ways for these")
            }
        }
    }

    fn rename(&self, (from, moved): (Place<'a>, Node), to: Place<'a>, no_replace: bool) -> Vec<Outcome<'a>> {
        let there = self.names.get(&to).copied();
        if there == Some(moved) && !no_replace {
            return vec![(Answer::Done, vec![])];
        }
        let mut found = Vec::new();
        if no_replace && there.is_some() {
            found.push(refused(Errno::Exists));
        }
        if matches!(moved, Node::Directory(id) if self.is_below(to.0, id)) {
            found.push(refused(Errno::Loop));
        }
        match (moved, there) {
            (Node::Directory(_), Some(Node::File(_))) => found.push(refused(Errno::NotDirectory)),
            (Node::File(_), Some(Node::Directory(_))) => found.push(refused(Errno::IsDirectory)),
            _ => {}
        }
        // Linux says so of a file too, if the file is below the directory.
        if there.is_some_and(|there| self.is_full(there)) {
            found.push(refused(Errno::NotEmpty));
        }
        if found.is_empty() { vec![(Answer::Done, vec![(from, None), (to, Some(moved))])] } else { found }
    }

    fn link(&self, source: Node, to: Place<'a>) -> Vec<Outcome<'a>> {
        let mut found = Vec::new();
        if self.names.contains_key(&to) {
            found.push(refused(Errno::Exists));
        }
        if let Node::Directory(_) = source {
            found.push((Answer::RefusedSomehow, vec![]));
        } else if !self.names.values().any(|node| *node == source) {
            found.push(refused(Errno::NotFound));
        }
        if found.is_empty() { vec![(Answer::Done, vec![(to, Some(source))])] } else { found }
    }

    fn change(&mut self, change: &Change<'a>) {
        for (place, after) in change.iter().copied() {
            let before = match after {
                Some(node) => self.names.insert(place, node),
                None => self.names.remove(&place),
            };
            if let Some(Node::Directory(id)) = before {
                self.parents.remove(&id);
            }
            if let Some(Node::Directory(id)) = after {
                self.parents.insert(id, place.0);
            }
        }
    }

    fn words(&self, directory: u64, above: &str) -> String {
        let one = |(name, node)| {
            let below = match node {
                Node::File(_) => String::new(),
                Node::Directory(id) => self.words(id, &format!("{above}{name}/")),
            };
            format!("  /{above}{name}: {node:?}\n{below}")
        };
        self.list(directory).map(one).collect()
    }
}

/// An event as the search needs it.
#[derive(Debug)]
struct Asked<'a> {
    index: usize,
    call: &'a Call,
    told: &'a Told,
    begun: u64,
    /// `None`: there is no answer, so the call never ends.
    ended: Option<u64>,
    /// Whether the answer says that the call changed nothing.
    reads: bool,
    /// For each path, the names that are looked up one by one, and the name of the last step.
    walks: Vec<Vec<&'a str>>,
    lasts: Vec<&'a str>,
}

impl<'a> Asked<'a> {
    fn new(index: usize, event: &'a Event) -> Self {
        let (call, told) = (&event.call, &event.told);
        let (paths, whole) = match call {
            Call::List { path } => (vec![path], true),
            Call::Link { from, to } => (vec![from, to], true),
            Call::Rename { from, to, .. } => (vec![from, to], false),
            Call::Look { path }
            | Call::Create { path, .. }
            | Call::Mkdir { path, .. }
            | Call::Unlink { path }
            | Call::Rmdir { path } => (vec![path], false),
        };
        let (mut walks, mut lasts) = (Vec::new(), Vec::new());
        for path in paths {
            let mut steps: Vec<_> = path.split('/').filter(|step| !step.is_empty()).collect();
            let last = if whole && walks.is_empty() { None } else { steps.pop() };
            walks.push(steps);
            lasts.push(last.unwrap_or(""));
        }
        let reads = match (call, told) {
            (Call::Look { .. } | Call::List { .. }, _) | (_, Told::Refused(_)) => true,
            (Call::Create { file, .. }, Told::Is(node)) => *node != Node::File(*file),
            _ => false,
        };
        let ended = (*told != Told::Unknown).then_some(event.ended.max(event.begun));
        Self { index, call, told, begun: event.begun, ended, reads, walks, lasts }
    }

    /// Returns whether the event can be wrong or change the tree.
    fn counts(&self) -> bool {
        *self.told != Told::Refused(Errno::Stale) && (self.ended.is_some() || !self.reads)
    }

    fn was_told(&self, answer: Answer, tree: &Tree<'a>) -> bool {
        match (self.told, answer) {
            (Told::Done, Answer::Done) | (Told::Refused(_), Answer::RefusedSomehow) => true,
            (Told::Is(told), Answer::Is(node)) => told.is_like(node),
            (Told::Names(told), Answer::Names(id)) => {
                let like = |((name, node), (there, is)): ((&String, &Node), (&str, Node))| {
                    name == there && node.is_like(is)
                };
                let there: Vec<_> = tree.list(id).collect();
                told.len() == there.len() && told.iter().zip(there).all(like)
            }
            (Told::Refused(told), Answer::Refused(errno)) => *told == errno,
            _ => false,
        }
    }
}

impl Node {
    /// Whether both may be one node. Directories have no identity over nodes: what is in them tells them apart.
    fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::File(one), Self::File(other)) => one == other,
            (Self::Directory(_), Self::Directory(_)) => true,
            (Self::File(_), Self::Directory(_)) | (Self::Directory(_), Self::File(_)) => false,
        }
    }
}

/// The part of the tree that a call looks at.
#[derive(Debug, Default)]
struct View<'a> {
    on_the_way: Vec<Place<'a>>,
    last: Vec<Place<'a>>,
    /// Directories whose names it may count or list, and some more.
    inside: Vec<u64>,
}

impl<'a> View<'a> {
    fn shows(&self, asked: &Asked<'a>, change: &Change<'a>, on_the_way_too: bool) -> bool {
        change.iter().any(|(place, after)| {
            let inside = match (asked.call, asked.told) {
                // A change that the answer does not tell can only make it wrong.
                (Call::List { .. }, Told::Names(names)) => names.get(place.1) == after.as_ref(),
                (Call::Rmdir { .. } | Call::Rename { .. }, _) => true,
                // A file can be linked as long as it has any name.
                (Call::Link { .. }, _) if after.is_none() => return true,
                _ => false,
            };
            (inside && self.inside.contains(&place.0))
                || self.last.contains(place)
                || (on_the_way_too && self.on_the_way.contains(place))
        })
    }
}

/// A node to which a path of a call leads.
#[derive(Debug, Clone, Copy)]
struct Way<'a> {
    /// Which of the call's paths it is.
    path: usize,
    /// The number of steps to the node.
    depth: usize,
    node: Node,
    place: Result<Place<'a>, Option<Errno>>,
    /// The node of the place.
    next: Option<Node>,
}

/// A node to which a call's path led before a name went away: the call, its path's number, the steps to the node, the node.
type Kept = (usize, usize, usize, Node);

/// The last call of an order, and those before it.
#[derive(Debug)]
struct Order(usize, Option<Rc<Self>>);

/// An order so far. Calls are given as indices of `Asked`.
#[derive(Debug, Clone, Default)]
struct Configuration<'a> {
    tree: Tree<'a>,
    /// The calls that have begun and are not in the order.
    at_work: Vec<usize>,
    /// The first call that has not begun, because one at work ended before.
    next: usize,
    kept: BTreeSet<Kept>,
    /// How many answered calls are in the order.
    answered: usize,
    order: Option<Rc<Order>>,
}

impl<'a> Configuration<'a> {
    /// Returns a number that tells apart all configurations of a search, but for one of ten million large searches.
    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.tree, &self.at_work, self.next, &self.kept).hash(&mut hasher);
        hasher.finish()
    }

    /// Returns all nodes to which the paths of a call lead, each with what is looked up there, or what ends the walk.
    fn ways(&self, all: &[Asked<'a>], call: usize) -> Vec<Way<'a>> {
        let mut ways: Vec<Way<'a>> = Vec::new();
        for (path, steps) in all[call].walks.iter().enumerate() {
            let first = |path| (call, path, 0, Node::File(0));
            let kept =
                self.kept.range(first(path)..first(path + 1)).map(|(_, _, depth, node)| (*depth, *node));
            let mut nodes = vec![(0, Node::Directory(ROOT))];
            nodes.extend(kept);
            let mut at = 0;
            while let Some((depth, node)) = nodes.get(at).copied() {
                let place = next_place(steps, depth, node);
                let next = place.ok().and_then(|place| self.tree.names.get(&place).copied());
                nodes.extend(next.map(|next| (depth + 1, next)).filter(|next| !nodes.contains(next)));
                ways.push(Way { path, depth, node, place, next });
                at += 1;
            }
        }
        ways
    }

    fn outcomes(&self, all: &[Asked<'a>], call: usize) -> Vec<Outcome<'a>> {
        let (mut ends, mut found) = (vec![vec![]; all[call].walks.len()], Vec::new());
        for way in self.ways(all, call) {
            match (way.place, way.next) {
                (Err(None), _) => ends[way.path].push(way.node),
                (Err(Some(errno)), _) => found.push(refused(errno)),
                (Ok(_), None) => found.push(refused(Errno::NotFound)),
                (Ok(_), Some(_)) => {}
            }
        }
        found.extend(self.tree.act(&all[call], &ends));
        found
    }

    fn view(&self, all: &[Asked<'a>], call: usize) -> View<'a> {
        let mut view = View::default();
        for way in self.ways(all, call) {
            match (way.place, way.node) {
                (Ok(place), _) => view.on_the_way.push(place),
                (Err(_), Node::File(_)) => {}
                (Err(_), Node::Directory(id)) => {
                    // A path that is looked up to its end has no last name, and "" is no name of the tree.
                    let last = (id, all[call].lasts[way.path]);
                    view.last.push(last);
                    view.inside.push(match self.tree.names.get(&last) {
                        Some(Node::Directory(below)) => *below,
                        _ => id,
                    });
                }
            }
        }
        view
    }

    /// Puts a call into the order, and then all those that only had to see this tree.
    fn take(&mut self, all: &[Asked<'a>], call: usize, change: &Change<'a>, paths: Paths) {
        self.put_into_order(all, call);
        if paths == Paths::Stepwise && change.iter().any(|(_, after)| after.is_none()) {
            self.keep(all, change);
        }
        self.tree.change(change);
        self.settle(all);
    }

    fn put_into_order(&mut self, all: &[Asked<'a>], call: usize) {
        self.at_work.retain(|at_work| *at_work != call);
        self.kept.retain(|kept| kept.0 != call);
        self.answered += usize::from(all[call].ended.is_some());
        self.order = Some(Rc::new(Order(call, self.order.take())));
    }

    /// Keeps what the changed places mean, for the calls at work whose paths lead through them.
    fn keep(&mut self, all: &[Asked<'a>], change: &Change<'a>) {
        let mut kept = Vec::new();
        for call in self.at_work.iter().copied() {
            for Way { path, depth, place, next, .. } in self.ways(all, call) {
                let is_changed = change.iter().any(|(changed, _)| Ok(*changed) == place);
                kept.extend(next.filter(|_| is_changed).map(|next| (call, path, depth + 1, next)));
            }
        }
        self.kept.extend(kept);
    }

    /// Lets calls begin, and puts those into the order that changed nothing and were told what is so. No later moment is better
    /// for them, and the calls that wait for their end are freer.
    fn settle(&mut self, all: &[Asked<'a>]) {
        loop {
            let first_end = self.at_work.iter().filter_map(|call| all[*call].ended).min();
            if all.get(self.next).is_some_and(|asked| first_end.is_none_or(|end| asked.begun <= end)) {
                self.at_work.push(self.next);
                self.next += 1;
                continue;
            }
            let is_so = |call: &usize| {
                let asked = &all[*call];
                let mut outcomes = self.outcomes(all, *call).into_iter();
                outcomes.any(|(answer, _)| asked.was_told(answer, &self.tree))
            };
            let mut reads = self.at_work.iter().copied().filter(|call| all[*call].reads);
            let Some(call) = reads.find(is_so) else { return };
            self.put_into_order(all, call);
        }
    }

    /// Returns what can be next, the best guess last: calls with an answer before those without, and what ended first before the
    /// others.
    ///
    /// A call without an answer can always wait. So it is next only if the order matters: to a call with an answer, to one without
    /// that cannot happen yet, or to one without that can be next. All is looked at here, except that a name which goes away does
    /// not matter to a path through it, because what it meant is kept. Moved directories are always tried, because a look-up that
    /// has not come so far may depend on them.
    fn steps(&self, all: &[Asked<'a>], paths: Paths) -> Vec<(usize, Change<'a>)> {
        let (mut steps, mut doubts) = (Vec::new(), Vec::new());
        for call in self.at_work.iter().copied().filter(|call| !all[*call].reads) {
            let asked = &all[call];
            for (answer, change) in self.outcomes(all, call) {
                let (fits, list) = match asked.ended {
                    Some(_) => (asked.was_told(answer, &self.tree), &mut steps),
                    None => (!change.is_empty(), &mut doubts),
                };
                let step = (call, change);
                if fits && !list.contains(&step) {
                    list.push(step);
                }
            }
        }
        steps.sort_by_key(|(call, _)| Reverse(all[*call].ended));
        if doubts.is_empty() {
            return steps;
        }
        let with_answer = steps.len();
        let views: BTreeMap<_, _> = self.at_work.iter().map(|call| (*call, self.view(all, *call))).collect();
        let mut lookers = self.at_work.clone();
        lookers.retain(|call| doubts.iter().all(|(doubt, _)| doubt != call));
        loop {
            let known = steps.len();
            doubts.retain(|(call, change)| {
                let after_it =
                    |other: &usize| other != call && views[other].shows(&all[*other], change, true);
                let before_it = |(other, first): &(usize, Change<'a>)| {
                    other != call && views[call].shows(&all[*call], first, paths == Paths::Whole)
                };
                let matters = matches!(change[..], [_, (_, Some(Node::Directory(_)))])
                    || lookers.iter().any(after_it)
                    || steps.iter().any(before_it);
                if matters {
                    steps.push((*call, change.clone()));
                    lookers.push(*call);
                }
                !matters
            });
            if steps.len() == known {
                steps.rotate_left(with_answer);
                return steps;
            }
        }
    }
}

/// Checks a history that begins with an empty tree.
pub(crate) fn check(events: &[Event]) -> Result<Checked, Wrong> {
    check_with(events, Paths::Stepwise, CONFIGURATIONS_MAX)
}

pub(crate) fn check_with(events: &[Event], paths: Paths, most: usize) -> Result<Checked, Wrong> {
    let mut all: Vec<_> = events.iter().enumerate().map(|(index, event)| Asked::new(index, event)).collect();
    all.retain(Asked::counts);
    all.sort_by_key(|asked| asked.begun);
    let answered = all.iter().filter(|asked| asked.ended.is_some()).count();
    let at_once = |at: u64| events.iter().filter(|event| event.begun <= at && at <= event.ended).count();
    let overlap = events.iter().map(|event| at_once(event.begun)).max().unwrap_or(0);

    let mut first = Configuration::default();
    first.settle(&all);
    let mut best = first.clone();
    let mut known = HashSet::new();
    let mut untried = vec![first];
    let mut configurations = 1;
    while let Some(configuration) = untried.pop() {
        let gave_up = configurations >= most;
        if configuration.answered == answered || gave_up {
            let gave_up = configuration.answered < answered;
            return Ok(Checked { events: events.len(), overlap, configurations, gave_up });
        }
        for (call, change) in configuration.steps(&all, paths) {
            let mut after = configuration.clone();
            after.take(&all, call, &change, paths);
            configurations += 1;
            if known.insert(after.identity()) {
                untried.push(after);
            }
        }
        if configuration.answered > best.answered {
            best = configuration;
        }
    }
    Err(Wrong::new(events, &all, &best))
}

impl Wrong {
    fn new(events: &[Event], all: &[Asked<'_>], best: &Configuration<'_>) -> Self {
        let mut order = Vec::new();
        let mut rest = best.order.as_deref();
        while let Some(Order(call, before)) = rest {
            order.push(all[*call].index);
            rest = before.as_deref();
        }
        order.reverse();
        let answered = best.at_work.iter().filter(|call| all[**call].ended.is_some());
        let stuck: Vec<_> = answered.map(|call| all[*call].index).collect();
        let lines = |of: &[usize]| {
            of.iter().map(|index| format!("  {}", events[*index])).collect::<Vec<_>>().join("\n")
        };
        let shown = &order[order.len().saturating_sub(STORY_MAX)..];
        let tree = best.tree.words(ROOT, "");
        let (calls, ordered, shown, next) = (events.len(), order.len(), lines(shown), lines(&stuck));
        let story = format!(
            "no order of {calls} calls explains their answers\n\
             after {ordered} of them, of which the last are\n{shown}\n\
             the tree is\n{tree}\
             and none of these can be next\n{next}"
        );
        Self { order, tree, stuck, story }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.story)
    }
}

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |us: u64| format!("{}.{:03}", us / 1000, us % 1000);
        let Self { client, call, told, .. } = self;
        write!(out, "{} to {} ms, {client}: {call:?} -> {told:?}", ms(self.begun), ms(self.ended))
    }
}

#[cfg(test)]
#[path = "history_test.rs"]
mod tests;
