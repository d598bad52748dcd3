//! Does the mount pass the tests of other file systems: pjdfstest (the calls, their errors and times) and fsx (random
//! changes of one file, every byte compared)?
//!
//! Owns: running both in a real daemon's mount, with and without passthrough, and in a disk's directory and a tmpfs
//! for comparison; one line of counts for each. Does not own: the two tools, which `cargo xtask test` builds and which
//! are only ever run; the mount's further promises (suite mount).
//!
//! Both mounts must give exactly the results in `known.txt`, and otherwise pass everything. The comparison's places
//! belong to the machine, so only the number of cases that ran is checked there.

#![expect(clippy::print_stdout, reason = "the counts are what a person runs this suite for")]
#![expect(clippy::unwrap_used, reason = "a scenario's own step that fails is a failure of its test")]

mod differential;
mod fsx;
mod known;
mod pjdfstest;
mod place;

use crate::known::Mode;
use crate::place::Place;

#[test]
fn pjdfstest_with_passthrough() {
    if let (Some(tool), Some(place)) = (pjdfstest::tool(), Place::mount(Mode::Passthrough)) {
        pjdfstest::run(&tool, &place).assert_as_known(Mode::Passthrough);
    }
}

#[test]
fn pjdfstest_without_passthrough() {
    if let (Some(tool), Some(place)) = (pjdfstest::tool(), Place::mount(Mode::Fallback)) {
        pjdfstest::run(&tool, &place).assert_as_known(Mode::Fallback);
    }
}

/// Runs the same cases on well-known file systems.
#[test]
fn pjdfstest_on_disk_and_tmpfs() {
    let (Some(tool), Some(tmpfs)) = (pjdfstest::tool(), Place::tmpfs()) else { return };
    for place in [Place::disk(), tmpfs] {
        pjdfstest::run(&tool, &place);
    }
}

#[test]
fn fsx_with_passthrough() {
    if let (Some(tool), Some(place)) = (fsx::tool(), Place::mount(Mode::Passthrough)) {
        fsx::run(&tool, &place);
    }
}

#[test]
fn fsx_without_passthrough() {
    if let (Some(tool), Some(place)) = (fsx::tool(), Place::mount(Mode::Fallback)) {
        fsx::run(&tool, &place);
    }
}

/// Runs the same seeds on file systems that are right. A failure there would be the tool's.
#[test]
fn fsx_on_disk_and_tmpfs() {
    let (Some(tool), Some(tmpfs)) = (fsx::tool(), Place::tmpfs()) else { return };
    for place in [Place::disk(), tmpfs] {
        fsx::run(&tool, &place);
    }
}

/// Runs the same calls in all places, with and without passthrough. Their results differ only where SEMANTICS.md says so.
#[test]
fn the_mount_answers_as_a_disk_and_a_tmpfs_do() {
    let (Some(passthrough), Some(tmpfs)) = (Place::mount(Mode::Passthrough), Place::tmpfs()) else { return };
    let Some(fallback) = Place::mount(Mode::Fallback) else { return };
    differential::assert_alike(&[passthrough, fallback], &Place::disk(), &tmpfs);
}
