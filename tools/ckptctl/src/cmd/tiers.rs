//! `ckptctl tiers`: where bytes can be, and how full it is there.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text::clean;
use std::io::{self, Write};
use tidemark_api::TiersRequest;
use tidemark_protocol::report::{ExitCode, TierState, TierStatus};
use tidemark_protocol::size::Shown;

/// Show each tier: how much it holds, who uses it, what was probed
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        context.print(&context.client.get(TiersRequest).await?, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(tiers: &Vec<TierStatus>, out: &mut dyn Write) -> io::Result<()> {
    table::write(&table(tiers), out)?;
    for tier in tiers {
        writeln!(out, "\n {}: {}", clean(&tier.name), clean(&tier.medium))?;
        for (user, bytes) in &tier.used_by {
            writeln!(out, "   {:>11}  {}", Shown(*bytes), clean(user))?;
        }
        if let Some(marks) = tier.marks {
            let (high, low) = (Shown(marks.high_bytes), Shown(marks.low_bytes));
            writeln!(out, "   gives way above {high}, down to {low}")?;
        }
        if !tier.held_by.is_empty() {
            writeln!(
                out,
                "   not below {} because of",
                Shown(tier.marks.map_or(0, |marks| marks.low_bytes))
            )?;
        }
        for (reason, bytes) in &tier.held_by {
            writeln!(out, "   {:>11}  {}", Shown(*bytes), clean(reason))?;
        }
        for (fact, known) in [("fencing", tier.fencing), ("part checksums", tier.part_checksums)] {
            if let Some(known) = known {
                writeln!(out, "   {fact}: {}", if known { "yes" } else { "no" })?;
            }
        }
        for note in &tier.notes {
            writeln!(out, "   {}", clean(note))?;
        }
    }
    Ok(())
}

/// Makes a table with a row for each tier; `status` shows it too.
pub(super) fn table(tiers: &[TierStatus]) -> comfy_table::Table {
    let mut table = table::new(["TIER", "USED", "SIZE", "FILES", "WARM", "QUEUED", "STATE"]);
    for tier in tiers {
        let tone = match tier.state {
            TierState::Ok => Tone::Good,
            TierState::Warming | TierState::Off | TierState::Unknown => Tone::Doubtful,
            TierState::Full | TierState::Away => Tone::Bad,
        };
        table.add_row([
            table::text(&tier.name),
            table::bytes(tier.used_bytes),
            tier.size_bytes.map_or_else(|| table::number("-"), table::bytes),
            table::number(tier.files),
            table::number(
                tier.warm_fraction.map_or_else(|| "-".to_owned(), |part| format!("{:.0}%", part * 100.0)),
            ),
            table::bytes(tier.queued_bytes),
            table::word(tier.state.word(), tone),
        ]);
    }
    table
}
