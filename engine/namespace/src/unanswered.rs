//! Operations on names that have not been answered yet, in their order, and the publication that is on its way.
//!
//! Owns: which operations are kept, their numbers, the numbers of publications, what the journal knows of both. Does not own: the content
//! of an operation (`protocol::cluster::operation`), sending (`cluster::publisher`).
//!
//! A daemon that takes over goes on where the previous one was killed: it sends the publication that was on its way again, under the same
//! number, and then the later operations. Thus removals and renames made here reach every node, and states need not create names again.
//! Such created names could include some that other nodes removed meanwhile.

use std::collections::{BTreeMap, VecDeque};
use tidemark_protocol::cluster::carried::Carried;
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::id::FileId;

/// Operations kept while no coordinator takes them: a coordinator that is away for an hour while a save a minute makes a thousand files
/// each. About 100 bytes each.
const OPERATIONS_MAX: usize = 1 << 18;

/// The part of the journal that operations may have: half of what is left beside the largest snapshot.
const JOURNAL_PARTS: u64 = 8;

/// How far publication has come, as the journal has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// The last publication that was made.
    pub(super) publication: u64,
    /// The last publication that was answered.
    pub(super) answered: u64,
    /// Whether the last publication is sent, repeatedly, until it is answered.
    pub(super) on_its_way: bool,
    /// The number of the first operation that is not answered.
    pub(super) first: u64,
    /// Number of operations, from `first` on, in the publication on its way.
    pub(super) sent: u64,
    /// Whether operations are missing: then everything has to be published, and names created from it.
    pub(super) lost: bool,
}

/// Unanswered operations, and how far they are published.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    progress: Progress,
    operations: VecDeque<Kept>,
    /// Number before which the journal has all operations; none if they were too many.
    journaled: Option<u64>,
    /// Bytes that the journaled operations take in the journal, as long as they are kept.
    journaled_bytes: u64,
    /// Bytes that the journaled operations may take in the journal.
    journaled_bytes_max: u64,
    /// Whether the progress has changed since the journal recorded it.
    moved: bool,
    /// Number of losses in this daemon's time.
    losses: u64,
}

/// An operation that has not been answered.
#[derive(Debug)]
struct Kept {
    operation: NameOperation,
    /// How many changes of names came before it.
    names_before: u64,
    /// Bytes that the operation takes in the journal; 0 if it is not there.
    journaled_bytes: u64,
}

impl Unanswered {
    /// Starts without operations, for a journal of `journal_bytes` that has none.
    pub(super) fn new(journal_bytes: u64) -> Self {
        Self {
            journaled: Some(0),
            journaled_bytes_max: journal_bytes / JOURNAL_PARTS,
            moved: true,
            ..Self::default()
        }
    }

    /// Recovers the progress and the operations in a journal. If operations are missing there, they are lost.
    pub(super) fn found(
        progress: Progress,
        mut operations: BTreeMap<u64, NameOperation>,
        journal_bytes: u64,
    ) -> Self {
        let operations = operations.split_off(&progress.first);
        let mut all = Self { progress, ..Self::new(journal_bytes) };
        let mut is_whole = true;
        for (number, operation) in operations {
            is_whole &= number == all.next();
            let journaled_bytes = operation.to_bytes().len() as u64;
            all.journaled_bytes += journaled_bytes;
            all.operations.push_back(Kept { operation, names_before: 0, journaled_bytes });
        }
        if !is_whole || all.progress.sent > all.operations.len() as u64 {
            all.lose();
        }
        all.journaled = Some(all.next());
        all
    }

    /// Returns the number of the first operation that has no answer.
    pub(super) fn first(&self) -> u64 {
        self.progress.first
    }

    /// Returns the number of the next operation.
    pub(super) fn next(&self) -> u64 {
        self.progress.first + self.operations.len() as u64
    }

    /// Adds an operation. `names_before`: how many changes of names came before it.
    pub(super) fn push(&mut self, operation: NameOperation, names_before: u64) {
        if self.operations.len() >= OPERATIONS_MAX {
            self.lose();
        }
        self.operations.push_back(Kept { operation, names_before, journaled_bytes: 0 });
    }

    /// Counts the changes of names anew, for operations that a journal had. `count` counts those of one operation, and returns how many came
    /// before it.
    pub(super) fn count_names(&mut self, mut count: impl FnMut(&NameOperation) -> u64) {
        for kept in &mut self.operations {
            kept.names_before = count(&kept.operation);
        }
    }

    /// Drops the operations: only publishing everything suffices now.
    fn lose(&mut self) {
        self.answered_until(self.next());
        self.miss();
    }

    /// Notes that operations are missing: everything has to be published, after the operations that are kept.
    pub(super) fn miss(&mut self) {
        self.losses += 1;
        self.moved |= !std::mem::replace(&mut self.progress.lost, true);
    }

    /// Returns the last loss, if it was not made up for.
    pub(super) fn lost(&self) -> Option<u64> {
        self.progress.lost.then_some(self.losses)
    }

    /// Notes that everything was published since that loss.
    pub(super) fn make_up(&mut self, loss: u64) {
        if loss == self.losses {
            self.moved |= std::mem::take(&mut self.progress.lost);
        }
    }

    pub(super) fn operations(&self) -> impl Iterator<Item = &NameOperation> {
        self.operations.iter().map(|kept| &kept.operation)
    }

    /// Returns the operations that are not in publications up to this one. The answer to that one may be lost.
    pub(super) fn after(&self, publication: u64) -> impl Iterator<Item = &NameOperation> {
        self.kept_after(publication).map(|kept| &kept.operation)
    }

    fn kept_after(&self, publication: u64) -> impl Iterator<Item = &Kept> {
        let has_sent = self.progress.on_its_way && self.progress.publication <= publication;
        let sent = if has_sent { self.progress.sent } else { 0 };
        self.operations.iter().skip(usize::try_from(sent).unwrap_or(usize::MAX))
    }

    /// Returns how many changes of names, of `all`, are in publications up to this one. None where that is not known: operations are missing,
    /// or a later publication was answered.
    pub(super) fn names_until(&self, publication: u64, all: u64) -> Option<u64> {
        if self.progress.lost || publication < self.progress.answered {
            return None;
        }
        Some(self.kept_after(publication).next().map_or(all, |kept| kept.names_before))
    }

    pub(super) fn count(&self) -> usize {
        self.operations.len()
    }

    pub(super) fn has_operations(&self) -> bool {
        !self.operations.is_empty()
    }

    /// Whether the publication on its way has all operations.
    pub(super) fn has_all_sent(&self) -> bool {
        self.operations.len() as u64 == self.progress.sent
    }

    /// Returns the number of the last publication.
    pub(super) fn publication(&self) -> u64 {
        self.progress.publication
    }

    /// Returns the number of the last answered publication.
    pub(super) fn last_answered(&self) -> u64 {
        self.progress.answered
    }

    /// Replaces what made a file that other nodes have removed or replaced since by the file's removal. A node that has the file's successor
    /// would otherwise be made to replace it by the older of the two. No publication is on its way. `is_here`: whether a file has a name.
    pub(super) fn end_replaced(&mut self, is_here: impl Fn(FileId) -> bool) {
        let gone = self.operations().enumerate().filter_map(|(at, operation)| match operation {
            NameOperation::File { path, file, .. } => (!is_here(*file)).then(|| (at, path.clone(), *file)),
            _ => None,
        });
        let gone: Vec<_> = gone.collect();
        if gone.is_empty() {
            return;
        }
        let carried = Carried::after(self.operations().cloned().collect());
        let mut first = None;
        for (at, path, file) in gone {
            // A file that this node has moved or removed itself is told with that: its way may have ended what others still have.
            if carried.left_by(at) == [path.as_slice()] {
                self.operations[at].operation = NameOperation::Removed { path, what: Some(file) };
                first = first.or(Some(at));
            }
        }
        // The journal gets them under the same numbers.
        if let (Some(first), Some(journaled)) = (first, &mut self.journaled) {
            *journaled = (*journaled).min(self.progress.first + first as u64);
            let again = self.operations.iter_mut().skip(first);
            self.journaled_bytes -= again.map(|kept| std::mem::take(&mut kept.journaled_bytes)).sum::<u64>();
        }
    }

    /// Returns the publication that has not been answered, with its operations.
    pub(super) fn on_its_way(&self) -> Option<(u64, Vec<NameOperation>)> {
        let sent = usize::try_from(self.progress.sent).unwrap_or(usize::MAX);
        let operations = || self.operations().take(sent).cloned().collect();
        self.progress.on_its_way.then(|| (self.progress.publication, operations()))
    }

    /// Makes the next publication, of up to `most` operations and of up to `bytes_most` besides the last; returns its number. The
    /// previous publication has been answered, or is not sent any more.
    pub(super) fn publish(&mut self, most: usize, bytes_most: usize) -> u64 {
        let mut bytes = 0;
        let fits = |kept: &&Kept| {
            let fits = bytes < bytes_most;
            bytes += kept.operation.bytes_most();
            fits
        };
        let sent = self.operations.iter().take(most).take_while(fits).count();
        self.progress.publication += 1;
        self.progress.on_its_way = true;
        self.progress.sent = sent as u64;
        self.moved = true;
        self.progress.publication
    }

    /// Notes that the publication on its way was answered.
    pub(super) fn answered(&mut self) {
        self.answered_until(self.progress.first + self.progress.sent);
        self.moved |= std::mem::take(&mut self.progress.on_its_way);
        self.progress.answered = self.progress.publication;
    }

    /// Notes that the publication on its way will not be sent again as it is: its operations are published with others.
    pub(super) fn unsent(&mut self) {
        self.progress.sent = 0;
        self.moved |= std::mem::take(&mut self.progress.on_its_way);
    }

    /// Drops the operations before this number, which are known elsewhere.
    pub(super) fn answered_until(&mut self, number: u64) {
        let count = number.saturating_sub(self.progress.first).min(self.operations.len() as u64);
        let answered = self.operations.drain(..usize::try_from(count).unwrap_or(usize::MAX));
        self.journaled_bytes -= answered.map(|kept| kept.journaled_bytes).sum::<u64>();
        self.progress.first += count;
        self.progress.sent = self.progress.sent.saturating_sub(count);
        self.moved |= count > 0;
        if self.operations.is_empty() {
            self.journaled = Some(self.progress.first);
        }
    }

    /// Returns what the journal does not have: the progress, and operations with their numbers.
    pub(super) fn unjournaled(&mut self) -> (Option<Progress>, Vec<(u64, Vec<u8>)>) {
        let mut operations = Vec::new();
        if let Some(from) = self.journaled {
            let from = from.max(self.progress.first);
            let old = usize::try_from(from - self.progress.first).unwrap_or(usize::MAX);
            for (number, kept) in (from..).zip(self.operations.iter_mut().skip(old)) {
                let bytes = kept.operation.without_xattrs().to_bytes();
                kept.journaled_bytes = bytes.len() as u64;
                self.journaled_bytes += kept.journaled_bytes;
                operations.push((number, bytes));
            }
            let fits = self.journaled_bytes <= self.journaled_bytes_max
                && operations.iter().all(|(_, bytes)| bytes.len() <= super::record::MAX_OPERATION_BYTES);
            if fits {
                self.journaled = Some(self.next());
            } else {
                // A daemon that is killed now loses the operations, and its successor knows that.
                self.journaled = None;
                self.moved = true;
                operations.clear();
            }
        }
        (std::mem::take(&mut self.moved).then(|| self.in_journal()), operations)
    }

    /// Whether the progress or an operation is missing in the journal.
    pub(super) fn has_unjournaled(&self) -> bool {
        self.moved || self.journaled.is_some_and(|journaled| journaled < self.next())
    }

    /// Returns everything for a snapshot. Operations that the journal does not have are left to the next change.
    pub(super) fn snapshot(&self) -> (Progress, impl Iterator<Item = (u64, Vec<u8>)>) {
        let until = self.journaled.unwrap_or(self.progress.first);
        let operations = (self.progress.first..until).zip(self.operations());
        let operations =
            operations.map(|(number, operation)| (number, operation.without_xattrs().to_bytes()));
        (self.in_journal(), operations)
    }

    fn in_journal(&self) -> Progress {
        Progress { lost: self.progress.lost || self.journaled.is_none(), ..self.progress }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOMY: u64 = 1 << 20;

    fn removed(path: u8) -> NameOperation {
        NameOperation::Removed { path: vec![path], what: None }
    }

    fn publish(all: &mut Unanswered, most: usize) -> (u64, Vec<NameOperation>) {
        all.publish(most, usize::MAX);
        all.on_its_way().unwrap()
    }

    /// A journal: takes the result of `unjournaled` as a replay does.
    #[derive(Default)]
    struct Journal {
        progress: Option<Progress>,
        operations: BTreeMap<u64, NameOperation>,
    }

    impl Journal {
        fn take(&mut self, all: &mut Unanswered) {
            let (progress, operations) = all.unjournaled();
            for (number, bytes) in operations {
                self.operations.insert(number, NameOperation::from_bytes(&bytes).unwrap());
            }
            self.progress = progress.or(self.progress);
        }

        fn found(&self) -> Unanswered {
            Unanswered::found(self.progress.unwrap(), self.operations.clone(), ROOMY)
        }
    }

    #[test]
    fn a_daemon_that_takes_over_sends_the_same_publication_and_then_what_came_after_it() {
        let (mut all, mut journal) = (Unanswered::new(ROOMY), Journal::default());
        for path in 0..3 {
            all.push(removed(path), 0);
            journal.take(&mut all);
        }
        assert_eq!(publish(&mut all, 2), (1, vec![removed(0), removed(1)]));
        journal.take(&mut all);
        let mut found = journal.found();
        assert_eq!(found.on_its_way(), Some((1, vec![removed(0), removed(1)])));
        found.answered();
        assert_eq!((found.on_its_way(), found.lost()), (None, None));
        assert_eq!(publish(&mut found, 9), (2, vec![removed(2)]));
        // If the journal does not have an answer, the publication is sent again, and applied once by its number.
        all.answered();
        assert_eq!(journal.found().on_its_way(), Some((1, vec![removed(0), removed(1)])));
        journal.take(&mut all);
        assert_eq!(journal.found().on_its_way(), None);
        assert_eq!(publish(&mut journal.found(), 9), (2, vec![removed(2)]));
    }

    #[test]
    fn what_is_not_sent_as_it_was_is_told_under_the_next_number() {
        let mut all = Unanswered::new(ROOMY);
        (0..2).for_each(|path| all.push(removed(path), 0));
        assert_eq!(all.publish(1, usize::MAX), 1);
        all.unsent();
        assert_eq!(publish(&mut all, 9), (2, vec![removed(0), removed(1)]));
        all.answered();
        assert!(!all.has_operations());
    }

    #[test]
    fn what_a_publication_holds_is_known_of_each_name_unless_operations_are_missing() {
        let mut all = Unanswered::new(ROOMY);
        // A rename changes two names.
        [0, 1, 3].into_iter().zip(0..).for_each(|(before, path)| all.push(removed(path), before));
        assert_eq!(all.names_until(0, 4), Some(0));
        all.publish(2, usize::MAX);
        assert_eq!([0, 1].map(|publication| all.names_until(publication, 4)), [Some(0), Some(3)]);
        all.answered();
        assert_eq!(all.names_until(1, 4), Some(3));
        assert_eq!(all.names_until(0, 4), None, "what was answered is not here any more");
        all.publish(2, usize::MAX);
        assert_eq!(all.names_until(2, 4), Some(4));
        all.miss();
        assert_eq!(all.names_until(2, 4), None);
    }

    #[test]
    fn a_publication_has_no_more_bytes_than_a_message_takes() {
        let mut all = Unanswered::new(ROOMY);
        (0..10).for_each(|number| all.push(removed(number), 0));
        let each = removed(0).bytes_most();
        all.publish(10, 3 * each);
        assert_eq!(all.on_its_way().map(|(_, operations)| operations.len()), Some(3));
        all.publish(10, 1);
        assert_eq!(
            all.on_its_way().map(|(_, operations)| operations.len()),
            Some(1),
            "one goes, however long"
        );
    }

    #[test]
    fn operations_beyond_their_part_of_the_journal_are_told_and_missed_only_by_the_next_daemon() {
        let (mut all, mut journal) = (Unanswered::new(ROOMY), Journal::default());
        all.push(removed(0), 0);
        journal.take(&mut all);
        all.push(removed(1), 0);
        all.journaled_bytes_max = 0;
        journal.take(&mut all);
        all.journaled_bytes_max = ROOMY;
        assert!(journal.found().lost().is_some() && all.lost().is_none());
        assert_eq!(publish(&mut all, 9), (1, vec![removed(0), removed(1)]));
        all.answered();
        journal.take(&mut all);
        assert!(journal.found().lost().is_none(), "all that was missing has been told");
        all.push(removed(2), 0);
        journal.take(&mut all);
        assert_eq!(publish(&mut journal.found(), 9), (2, vec![removed(2)]));
    }

    #[test]
    fn what_was_answered_takes_no_part_of_the_journal_while_more_comes() {
        let mut all = Unanswered::new(JOURNAL_PARTS * 4 * removed(0).to_bytes().len() as u64);
        all.push(removed(0), 0);
        for path in 1..100 {
            all.push(removed(path), 0);
            all.unjournaled();
            all.publish(1, usize::MAX);
            all.answered();
        }
        assert!(!all.in_journal().lost && all.has_operations());
    }

    #[test]
    fn a_gap_in_the_journal_is_a_loss() {
        let progress = Progress { first: 5, ..Progress::default() };
        let gap = BTreeMap::from([(4, removed(4)), (5, removed(5)), (7, removed(7))]);
        assert!(Unanswered::found(progress, gap, ROOMY).lost().is_some());
        let short = Progress { first: 5, sent: 2, ..Progress::default() };
        assert!(Unanswered::found(short, BTreeMap::from([(5, removed(5))]), ROOMY).lost().is_some());
    }

    #[test]
    fn more_than_is_kept_is_a_loss_until_everything_was_told() {
        let mut all = Unanswered::new(ROOMY);
        (0..=OPERATIONS_MAX).for_each(|_| all.push(removed(0), 0));
        let loss = all.lost().unwrap();
        assert_eq!(publish(&mut all, 9).1.len(), 1, "the last is kept");
        all.miss();
        all.make_up(loss);
        assert!(all.lost().is_some(), "there was another loss since");
        all.make_up(all.lost().unwrap());
        assert_eq!(all.lost(), None);
    }
}
