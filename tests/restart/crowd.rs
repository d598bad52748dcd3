//! Links that change places without a pause while everything else goes on. A tree document must still show one moment.
//!
//! Owns: the links' names and their content. Does not own: other operations, and the restarts (`main`).

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use tidemark_tests::campaign::dice::Dice;

/// Several times the nodes that the namespace reads in one hold of its lock (256), so that a snapshot meets exchanges.
const LINKS: usize = 1000;

#[derive(Debug)]
pub(crate) struct Crowd {
    pub(crate) root: PathBuf,
    targets: Vec<String>,
    dice: Dice,
}

impl Crowd {
    pub(crate) fn begin(root: PathBuf, dice: Dice) -> io::Result<Self> {
        fs::create_dir(&root)?;
        let targets: Vec<_> = (0..LINKS).map(|link| link.to_string()).collect();
        for target in &targets {
            std::os::unix::fs::symlink(target, root.join(target))?;
        }
        Ok(Self { root, targets, dice })
    }

    /// Exchanges links far apart until it is told to stop.
    pub(crate) fn mill(&mut self, ended: &AtomicBool) -> io::Result<()> {
        let half = LINKS as u64 / 2;
        while !ended.load(Ordering::Relaxed) {
            let (one, other) = (self.dice.within(0..half), half + self.dice.within(0..half));
            let at = |link: u64| self.root.join(link.to_string());
            renameat_with(CWD, at(one), CWD, at(other), RenameFlags::EXCHANGE)?;
            let index = |link: u64| usize::try_from(link).expect("below a length");
            self.targets.swap(index(one), index(other));
        }
        Ok(())
    }

    /// Returns the links that do not hold what they must.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let held = |(link, target): (usize, &String)| {
            let found = fs::read_link(self.root.join(link.to_string()));
            let right = found.as_ref().is_ok_and(|found| found.as_os_str() == target.as_str());
            (!right).then(|| format!("link {link} holds {found:?}, and must hold {target}"))
        };
        self.targets.iter().enumerate().filter_map(held).collect()
    }
}
