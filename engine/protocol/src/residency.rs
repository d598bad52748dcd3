//! Which copy of a file is read, and which are repaired.
//!
//! Owns: the order host, peer, object, and what follows from a copy that fails. Does not own: fetching and verifying
//! (the engine's restore path).

/// Where a copy is; cheaper ones compare lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    Host,
    Peer,
    Object,
}

/// What is known of a copy of one (file, seal).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyHealth {
    /// Its checksums were right when last read.
    Verified,
    /// Said to be there; not read since it came, or since a restart.
    Unverified,
    /// It failed its checksums. Never served again.
    Bad,
    /// Its place does not answer now.
    Away,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyStanding {
    pub place: Place,
    pub health: CopyHealth,
}

/// What to do for a read of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Try these in order, each verified before a byte is served; then write these again from the one that verified.
    Try { order: Vec<Place>, repair: Vec<Place> },
    /// Copies may exist, and none can be read now: wait, bounded, then an I/O error. Never "no such file".
    Wait { away: Vec<Place> },
    /// Every copy that is known is bad, or there is none: an I/O error.
    Lost { bad: Vec<Place> },
}

/// The cheapest copy first; at equal cost one that was verified.
#[must_use]
pub fn locate(copies: &[CopyStanding]) -> Source {
    let with = |health| -> Vec<Place> {
        let mut places: Vec<_> =
            copies.iter().filter(|copy| copy.health == health).map(|copy| copy.place).collect();
        places.sort_unstable();
        places
    };
    let (bad, away) = (with(CopyHealth::Bad), with(CopyHealth::Away));
    let mut usable: Vec<_> = copies
        .iter()
        .filter(|copy| matches!(copy.health, CopyHealth::Verified | CopyHealth::Unverified))
        .map(|copy| (copy.place, copy.health))
        .collect();
    usable.sort_unstable();
    match (usable.is_empty(), away.is_empty()) {
        (false, _) => {
            Source::Try { order: usable.into_iter().map(|(place, _)| place).collect(), repair: bad }
        }
        (true, false) => Source::Wait { away },
        (true, true) => Source::Lost { bad },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CopyHealth::{Away, Bad, Unverified, Verified};
    use Place::{Host, Object, Peer};

    fn at(copies: &[(Place, CopyHealth)]) -> Source {
        let standing =
            |(place, health): &(Place, CopyHealth)| CopyStanding { place: *place, health: *health };
        locate(&copies.iter().map(standing).collect::<Vec<_>>())
    }

    #[test]
    fn the_cheapest_copy_is_tried_first_and_a_bad_one_never() {
        let source = at(&[(Object, Verified), (Peer, Unverified), (Host, Bad)]);
        assert_eq!(source, Source::Try { order: vec![Peer, Object], repair: vec![Host] });
    }

    #[test]
    fn a_copy_that_is_away_is_waited_for_and_not_denied() {
        assert_eq!(at(&[(Host, Bad), (Object, Away)]), Source::Wait { away: vec![Object] });
        assert_eq!(at(&[(Host, Bad)]), Source::Lost { bad: vec![Host] });
        assert_eq!(at(&[]), Source::Lost { bad: Vec::new() });
    }
}
