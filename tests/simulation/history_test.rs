//! Right histories are accepted, and each kind of fault of a file system over nodes is found.

use super::Told::{Done, Unknown};
use super::*;

const ERRNOS: [Errno; 7] = {
    use Errno::{Exists, IsDirectory, Loop, NotDirectory, NotEmpty, NotFound, Stale};
    [NotFound, Exists, NotDirectory, IsDirectory, NotEmpty, Loop, Stale]
};
const CLIENTS: usize = 9;
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Simulated time from one random call to the next.
const STEP: u64 = 1000;
/// Most time that a random call waits before it happens, and again before its answer.
const WAIT_MAX: u64 = 9 * STEP;

/// Histories that are wrong, each with what it shows. See `history` for the words.
const WRONG: [(&str, &str); 18] = [
    ("two winners of O_EXCL", "0-10 create f 1 = file 1; 5-15 create f 2 = file 2"),
    ("a name seen and then missing", "0-9 create f 1 = file 1; 3-4 look f = file 1; 5-6 open f 2 = file 2"),
    ("a removed name that is back", "open f 1 = file 1; unlink f = done; look f = file 1"),
    ("a name removed twice", "open f 1 = file 1; 20-30 unlink f = done; 20-30 unlink f = done"),
    ("a look-up that misses a finished create", "create f 1 = file 1; look f = NotFound"),
    ("a look-up that shows what is made later", "look f = file 1; create f 1 = file 1"),
    ("the old file", "open f 1 = file 1; open g 2 = file 2; rename f g = done; look g = file 2"),
    ("a listing that lacks a create", "create f 1 = file 1; create g 2 = file 2; list / = names g:2"),
    ("a removed directory with a file", "mkdir d 1 = done; create d/f 2 = file 2; rmdir d = done"),
    ("a create in a removed directory", "mkdir d 1 = done; rmdir d = done; create d/f 2 = file 2"),
    ("a rename that leaves both names", "open f 1 = file 1; rename f g = done; list / = names f:1 g:1"),
    ("a rename that loses both names", "open f 1 = file 1; rename f g = done; list / = names"),
    ("a rename that replaced", "open f 1 = file 1; open g 2 = file 2; move f g = done"),
    ("two renames of one name", "open f 1 = file 1; 20-30 rename f g = done; 20-30 rename f h = done"),
    ("a link to another file", "open f 1 = file 1; open g 2 = file 2; link f h = done; look h = file 2"),
    ("mkdir done twice", "0-9 mkdir d 1 = done; 0-9 mkdir d 2 = done"),
    ("a directory in itself", "mkdir d 1 = done; rename d d/e = done"),
    (
        "a lost create that happens twice",
        "create f 1 = lost; look f = file 1; unlink f = done; look f = file 1",
    ),
];

/// Reads a history: calls with their answers, and before them the times if they are not one after the other.
fn history(text: &str) -> Vec<Event> {
    let calls = text.split([';', '\n']).map(str::trim).filter(|call| !call.is_empty());
    calls.enumerate().map(|(index, call)| event(10 * index as u64, call)).collect()
}

fn event(at: u64, text: &str) -> Event {
    let number = |word: &str| word.parse().expect("it is a number");
    let path = |word: &str| word.trim_start_matches('/').to_owned();
    let (call, told) = text.split_once(" = ").expect("a call has an answer");
    let (mut call, told): (Vec<_>, Vec<_>) = (call.split(' ').collect(), told.split(' ').collect());
    let times = call[0].split_once('-').map(|(begun, ended)| (number(begun), number(ended)));
    call.drain(..usize::from(times.is_some()));
    let (begun, ended) = times.unwrap_or((at, at + 9));
    let call = match call[..] {
        ["look", of] => Call::Look { path: path(of) },
        ["open", of, id] => Call::Create { path: path(of), exclusive: false, file: number(id) },
        ["create", of, id] => Call::Create { path: path(of), exclusive: true, file: number(id) },
        ["mkdir", of, id] => Call::Mkdir { path: path(of), directory: number(id) },
        ["unlink", of] => Call::Unlink { path: path(of) },
        ["rmdir", of] => Call::Rmdir { path: path(of) },
        ["rename", from, to] => Call::Rename { from: path(from), to: path(to), no_replace: false },
        ["move", from, to] => Call::Rename { from: path(from), to: path(to), no_replace: true },
        ["link", from, to] => Call::Link { from: path(from), to: path(to) },
        ["list", of] => Call::List { path: path(of) },
        _ => panic!("{text} is no call"),
    };
    let told = match told[..] {
        ["done"] => Done,
        ["lost"] => Unknown,
        ["file", id] => Told::Is(Node::File(number(id))),
        ["directory", id] => Told::Is(Node::Directory(number(id))),
        ["names", ref names @ ..] => {
            let names = names.iter().map(|name| name.split_once(':').expect("a name has a file"));
            Told::Names(names.map(|(name, id)| (name.to_owned(), Node::File(number(id)))).collect())
        }
        [errno] => {
            Told::Refused(ERRNOS.into_iter().find(|is| format!("{is:?}") == errno).expect("it is one"))
        }
        _ => panic!("{text} has no answer"),
    };
    Event { client: "client".to_owned(), call, told, begun, ended }
}

#[track_caller]
fn right(text: &str) {
    let checked = check(&history(text)).unwrap_or_else(|wrong| panic!("{wrong}"));
    assert!(!checked.gave_up);
}

/// Returns the events that cannot be next.
#[track_caller]
fn wrong(text: &str) -> Vec<usize> {
    check(&history(text)).expect_err(text).stuck
}

#[test]
fn wrong_histories_are_found() {
    for (what, text) in WRONG {
        assert!(check(&history(text)).is_err(), "{what}: {text}");
    }
}

#[test]
fn answers_one_after_the_other_are_those_of_posix() {
    right(
        "look / = directory 0; mkdir d 1 = done; mkdir d 9 = Exists; rmdir / = NotEmpty
        create d/f 2 = file 2; open d/f 9 = file 2; create d/f 9 = Exists; open d 9 = IsDirectory
        create d 9 = Exists; look d/f/g = NotDirectory; look e/f = NotFound; look e/f = Stale
        link d/f g = done; link d h = IsDirectory; link g d/f = Exists; link h i = NotFound
        rename g d/f = done; move g d/f = Exists; list d = names f:2; list g = NotDirectory
        rename d d/e = Loop; rename d g = NotDirectory; rename g d = IsDirectory; move h i = NotFound
        mkdir e 4 = done; rename e d = NotEmpty; rename d e = done; rmdir e = NotEmpty; list d = NotFound
        rmdir g = NotDirectory; unlink e = IsDirectory; unlink e/f = done; rmdir e = done; list / = names g:2",
    );
}

#[test]
fn calls_at_once_happen_in_any_order() {
    right("0-9 create f 1 = file 1; 1-2 look f = NotFound; 3-4 look f = file 1");
    right("0-9 create f 1 = Exists; 0-9 create f 2 = file 2");
    assert_eq!(wrong("0-9 create f 1 = file 1; 1-2 look f = file 1; 3-4 look f = NotFound"), [2]);
}

#[test]
fn a_call_without_an_answer_happens_late_or_never() {
    right("create f 1 = lost; look f = NotFound; look f = file 1");
    right("create f 1 = lost; look f = NotFound; create f 2 = file 2");
    right("mkdir d 1 = lost; create d/f 2 = lost; rename d e = lost; look d = NotFound; look e/f = file 2");
    assert_eq!(wrong("create f 1 = lost; look f = file 1; look f = NotFound"), [2]);
    // Calls that matter to no answer cost nothing.
    let lost: Vec<_> = (0..50).map(|id| format!("0-9 create f{id} {id} = lost")).collect();
    let events = history(&format!("{}; mkdir d 99 = done; look d = NotFound", lost.join(";")));
    assert!(check_with(&events, Paths::Stepwise, 10).is_err());
}

#[test]
fn a_path_is_looked_up_before_its_directory_is_moved() {
    let moved = |begun: u64, id: u64| {
        format!(
            "0-9 mkdir d 1 = done; {begun}-50 create d/f 2 = file {id}; 20-30 rename d e = done
            35-36 look e/f = NotFound; 60-69 look e/f = file 2"
        )
    };
    right(&moved(10, 2));
    assert!(check_with(&history(&moved(10, 2)), Paths::Whole, CONFIGURATIONS_MAX).is_err());
    assert_eq!(wrong(&moved(31, 2)), [1]);
    wrong(&moved(10, 3));
    // The link is to the file that was looked up.
    let linked = |begun: u64| {
        format!(
            "0-9 open f 1 = file 1; {begun}-50 link f g = done; 20-22 rename f h = done
            24-26 create f 2 = file 2; 28-29 look g = NotFound; 60-69 look g = file 1"
        )
    };
    right(&linked(10));
    wrong(&linked(23));
}

#[test]
fn the_story_tells_the_order_the_tree_and_what_is_stuck() {
    let events = history("mkdir d 1 = done; create d/f 2 = file 2; 3000-4000 list d = names g:2");
    let wrong = check(&events).expect_err("the listing is wrong");
    assert_eq!((&wrong.order[..], &wrong.stuck[..]), (&[0, 1][..], &[2][..]));
    assert_eq!(wrong.tree, "  /d: Directory(1)\n  /d/f: File(2)\n");
    let last = "  3.000 to 4.000 ms, client: List { path: \"d\" } -> Names({\"g\": File(2)})";
    assert!(wrong.to_string().ends_with(last), "{wrong}");
}

#[test]
fn a_search_gives_up_at_its_limit() {
    let events = history("0-9 create f 1 = file 1; 0-9 create g 2 = file 2; 0-9 unlink h = done");
    let checked = check_with(&events, Paths::Stepwise, 2).expect("nothing is known yet");
    assert_eq!((checked.gave_up, checked.events, checked.overlap), (true, 3, 3));
}

/// Numbers that follow from a seed: Marsaglia's xorshift.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("it is below a usize")
    }

    fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.index(all.len())].clone()
    }

    fn path(&mut self) -> String {
        let depth = self.one_of(&[1, 1, 2, 2, 2, 3]);
        (0..depth).map(|_| self.one_of(&NAMES)).collect::<Vec<_>>().join("/")
    }

    fn call(&mut self, id: u64) -> Event {
        let (path, other) = (self.path(), self.path());
        let call = match self.below(16) {
            0..=2 => format!("look {path}"),
            3 => format!("list {path}"),
            4 => "list /".to_owned(),
            5 | 6 => format!("create {path} {id}"),
            7 => format!("open {path} {id}"),
            8 | 9 => format!("mkdir {path} {id}"),
            10 => format!("unlink {path}"),
            11 => format!("rmdir {path}"),
            12 => format!("link {path} {other}"),
            13 => format!("move {path} {other}"),
            _ => format!("rename {path} {other}"),
        };
        event(0, &format!("{call} = done"))
    }

    /// Makes a right history. Call `i` happens at the time `STEP * i`, while its client makes no other call. One call of
    /// `lost_in` has no answer, and half of these never happen.
    fn history(&mut self, calls: u64, lost_in: u64) -> Vec<Event> {
        // What would be refused is asked in other words, so that enough is done.
        let wishes: Vec<_> = (1..=calls).map(|id| [0; 4].map(|_| self.call(id))).collect();
        let (mut events, mut trees) = (Vec::<Event>::new(), vec![Tree::default()]);
        let mut last_of = [None; CLIENTS];
        for (id, wish) in (1..).zip(&wishes) {
            let (now, client) = (STEP * id, self.index(CLIENTS));
            let free = last_of[client].map_or(0, |last: usize| events[last].ended + 1);
            let begun = now - 1 - self.below((now - free).min(WAIT_MAX));
            if let Some(last) = last_of[client] {
                events[last].ended += self.below((begun - events[last].ended).min(WAIT_MAX));
            }
            let mut answers = wish.each_ref().map(|event| (event, self.happens(event, begun, &trees)));
            answers.sort_by_key(|(_, (told, _))| matches!(told, Told::Refused(_)));
            let [(event, (told, change)), ..] = answers;
            let (is_lost, happens) = (self.below(lost_in) == 0, self.below(2) == 0);
            let mut tree = trees[trees.len() - 1].clone();
            if happens || !is_lost {
                tree.change(&change);
            }
            trees.push(tree);
            let (told, ended) =
                if is_lost { (Unknown, begun + self.below(now - begun)) } else { (told, now) };
            last_of[client] = Some(events.len());
            let client = format!("client {client}");
            events.push(Event { client, call: event.call.clone(), told, begun, ended });
        }
        events
    }

    /// Returns what comes of a call now that looked up its paths at random moments since it began.
    fn happens<'a>(&mut self, event: &'a Event, begun: u64, trees: &[Tree<'a>]) -> (Told, Change<'a>) {
        let asked = Asked::new(0, event);
        let mut ends = Vec::new();
        for steps in &asked.walks {
            let mut at = usize::try_from(begun / STEP).expect("it is an index of a tree");
            let mut node = Node::Directory(ROOT);
            for depth in 0..steps.len() {
                at += self.index(trees.len() - at);
                let place = next_place(steps, depth, node).map_err(|errno| errno.expect("a step is left"));
                match place.and_then(|place| trees[at].names.get(&place).ok_or(Errno::NotFound)) {
                    Ok(next) => node = *next,
                    Err(errno) => return (Told::Refused(errno), vec![]),
                }
            }
            ends.push(vec![node]);
        }
        let now = &trees[trees.len() - 1];
        let (answer, change) = self.one_of(&now.act(&asked, &ends));
        let names = |id| now.list(id).map(|(name, node)| (name.to_owned(), node)).collect();
        let told = match answer {
            Answer::Done => Done,
            Answer::Is(node) => Told::Is(node),
            Answer::Names(id) => Told::Names(names(id)),
            Answer::Refused(errno) => Told::Refused(errno),
            Answer::RefusedSomehow => Told::Refused(Errno::IsDirectory),
        };
        (told, change)
    }

    /// Changes one answer.
    fn lie(&mut self, events: &mut [Event]) {
        let answered: Vec<_> = (0..events.len()).filter(|at| events[*at].told != Unknown).collect();
        let Event { call, told, .. } = &mut events[self.one_of(&answered)];
        let any = Node::File(1 + self.below(answered.len() as u64));
        *told = match (&*call, &*told) {
            (_, Told::Names(names)) if names.is_empty() => Told::Names([("a".to_owned(), any)].into()),
            (_, Told::Names(names)) => Told::Names(names.clone().into_iter().skip(1).collect()),
            (_, Told::Is(node)) if *node != any && self.below(2) == 0 => Told::Is(any),
            (_, Done | Told::Is(_)) => Told::Refused(self.one_of(&[Errno::NotFound, Errno::Exists])),
            (Call::Look { .. }, _) => Told::Is(any),
            (Call::Create { file, .. }, _) => Told::Is(Node::File(*file)),
            (Call::List { .. }, _) => Told::Names(BTreeMap::new()),
            _ => Done,
        };
    }
}

#[test]
fn random_histories_are_right_until_an_answer_is_changed() {
    const HISTORIES: u64 = 40;
    for lost_in in [u64::MAX, 20, 10] {
        let (mut found, mut configurations, mut overlap) = (0, 0, 0);
        for seed in 1..=HISTORIES {
            let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut events = dice.history(200, lost_in);
            let checked = check(&events).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            assert!(!checked.gave_up, "seed {seed}");
            configurations = checked.configurations.max(configurations);
            overlap = checked.overlap.max(overlap);
            dice.lie(&mut events);
            found += u64::from(check(&events).is_err());
        }
        let percent = found * 100 / HISTORIES;
        println!("{percent} % found, {overlap} calls at once, up to {configurations} configurations");
        assert!(percent >= 80, "{percent} % found");
    }
}
