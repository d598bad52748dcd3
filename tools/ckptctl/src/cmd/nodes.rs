//! `ckptctl nodes`: the machines of this cluster.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use std::io::{self, Write};
use tidemark_protocol::report::{ExitCode, Node, NodeState};

/// List the nodes of the cluster
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        context.print(&context.client.nodes().await?, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(nodes: &Vec<Node>, out: &mut dyn Write) -> io::Result<()> {
    let mut table =
        table::new(["", "NODE", "STATE", "ROLE", "LISTEN", "TIER1 USED", "TIER1 SIZE", "EPOCH", "VERSION"]);
    for node in nodes {
        let tone = match node.state {
            NodeState::Serving => Tone::Good,
            NodeState::Starting | NodeState::Draining => Tone::Doubtful,
            NodeState::Degraded | NodeState::Stopped | NodeState::Unknown => Tone::Bad,
        };
        table.add_row([
            table::text(if node.this { "*" } else { "" }),
            table::text(&node.name),
            table::word(node.state.word(), tone),
            table::text(if node.coordinator { "coordinator" } else { "-" }),
            table::text(&node.listen),
            table::bytes(node.tier1_used_bytes),
            table::bytes(node.tier1_size_bytes),
            table::number(node.epoch),
            table::text(&node.version),
        ]);
    }
    table::write(&table, out)?;
    writeln!(out, " * = the node that answered")
}
