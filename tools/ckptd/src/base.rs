//! Memory and names of this node: made fresh, or gone on with after a daemon that died.
//!
//! Owns: the order in which the two come up, and the removal of memory without a successor. Does not own: either of them
//! (engine), the mount (`up`).

use crate::cli::Failure;
use crate::session::{Found, Record};
use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tidemark_engine::settings::Settings;
use tidemark_namespace::{Namespace, NamespaceSettings};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{KeptMounts, MediumChoice, SpillPlace, Tier1, Tier1Settings};

/// Tier-1 and the tree in it.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) incarnation: Incarnation,
    pub(crate) tier1_bytes: u64,
    pub(crate) tier1: Arc<Tier1>,
    pub(crate) namespace: Arc<Namespace>,
}

/// Memory that is this process's own. Dropped, however the start or the end went, it is removed, unless a next daemon is to go
/// on with it: the last of its files may never be dropped in a process that ends, and a folder outlives it.
#[derive(Debug, Default)]
pub(crate) struct OwnMemory {
    tier1: OnceLock<Arc<Tier1>>,
    is_kept: AtomicBool,
}

impl OwnMemory {
    fn is(&self, tier1: &Arc<Tier1>) {
        assert!(self.tier1.set(Arc::clone(tier1)).is_ok(), "a process has one memory");
    }

    /// From now on a next daemon may go on with it.
    pub(crate) fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    /// Marks the memory for removal, because no next daemon goes on with it.
    pub(crate) fn let_go(&self) {
        self.is_kept.store(false, Ordering::Release);
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        if let (Some(tier1), false) = (self.tier1.get(), *self.is_kept.get_mut()) {
            tier1.end();
        }
    }
}

fn tier1_settings(settings: &Settings, size_bytes: u64) -> Tier1Settings {
    let medium = settings.tier1.directory.clone().map_or(MediumChoice::Auto, MediumChoice::Directory);
    Tier1Settings { size_bytes, ballast: settings.tier1.ballast, medium }
}

/// Where the settings put the spill of this life of the node.
fn spill_place(
    settings: &Settings,
    node: &str,
    incarnation: Incarnation,
) -> anyhow::Result<Option<SpillPlace>> {
    let (Some(directory), Some(budget)) = (&settings.spill.directory, &settings.spill.budget) else {
        return Ok(None);
    };
    let shown = directory.display();
    let found = std::fs::metadata(directory)
        .with_context(|| format!("the spill cannot be used: spill.directory {shown} is to be there"))?;
    anyhow::ensure!(found.is_dir(), "the spill cannot be used: spill.directory {shown} is no directory");
    let budget_bytes =
        tidemark_protocol::size::parse(budget).map_err(|error| anyhow::anyhow!("spill.budget: {error}"))?;
    let name = format!("{node}-{incarnation}");
    Ok(Some(SpillPlace { directory: directory.clone(), name, budget_bytes }))
}

impl Base {
    /// Empty memory and an empty tree: a new life of this node.
    pub(crate) fn fresh(
        settings: &Settings,
        node: &str,
        tier1_bytes: u64,
        own: &OwnMemory,
    ) -> Result<Self, Failure> {
        let random = getrandom::u64().context("the kernel has random numbers").map_err(Failure::failed)?;
        let incarnation = Incarnation(random);
        let tier1 = Tier1::open(tier1_settings(settings, tier1_bytes))
            .context("Tier-1 cannot be made")
            .map_err(Failure::failed)?;
        own.is(&tier1);
        if let Some(place) = spill_place(settings, node, incarnation).map_err(Failure::usage)? {
            tier1.add_spill(&place).context("the spill cannot be used").map_err(Failure::failed)?;
        }
        let namespace = Namespace::new(NamespaceSettings::new(incarnation), Arc::clone(&tier1))
            .context("the namespace cannot be made")
            .map_err(Failure::failed)?;
        Ok(Self { incarnation, tier1_bytes, tier1, namespace })
    }

    /// The memory and the tree that are there. `session_goes_on`: so do the kernel's handles.
    pub(crate) fn take_over(
        settings: &Settings,
        record: &Record,
        mounts: KeptMounts,
        session_goes_on: bool,
        own: &OwnMemory,
    ) -> Result<Self, Failure> {
        own.keep();
        let (incarnation, tier1_bytes) = (record.incarnation(), record.tier1_bytes);
        let tier1 = Tier1::take_over(tier1_settings(settings, tier1_bytes), mounts)
            .context("Tier-1 cannot be taken over")
            .map_err(Failure::failed)?;
        own.is(&tier1);
        let namespace = Namespace::recover(
            NamespaceSettings::new(incarnation),
            Arc::clone(&tier1),
            session_goes_on,
            &mut |number| tier1.adopt(number),
        )
        .context("the namespace cannot be taken over")
        .map_err(Failure::failed)?;
        tier1.adopt_rest();
        Ok(Self { incarnation, tier1_bytes, tier1, namespace })
    }
}

impl Found {
    /// The kernel can say again what it was not answered, so that open files go on.
    pub(crate) fn session_goes_on(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.record.can_be_taken_over())
    }
}
