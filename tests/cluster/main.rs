//! The loss of a host: several hosts in network namespaces run real daemons and real ranks, and the suite checks what survives.
//!
//! | file | owns |
//! |---|---|
//! | `net` | the network itself: does each fault of the harness happen, and does it end? |
//! | `tree` | one tree: names and bytes of one node on the others, and after its loss |
//! | `remembered` | what a node answers by itself for a moment: other nodes' changes show all the same |
//! | `twin` | random calls on any node, daemons killed or not: are all nodes together one directory? |
//! | `site` | several nodes of one cluster, for the other files |
//! | `failover` | the coordinator is lost, stopped or cut off, and another node takes its role |
//! | `ending` | a node is told to end while another becomes the coordinator |
//! | `fixed` | a coordinator that has no lease begins again: the members that it waits for |
//! | `silent` | the coordinator is silent, and no node takes its role: what goes on |
//! | `copies` | copies in other nodes' memory that are bad |
//! | `links` | what a machine between nodes sees of a save and can change in it, and what strangers cost |
//! | `tier3` | how often Tier-3 is read |
//! | `members` | which members are cut off or gone, and what any node shows people |
//! | `nodes` | one daemon a host: where it listens, and that nothing of a lost one is left |
//! | `guarded` | an etcd with TLS, client certificates and users: who gets in, and that the cluster lives through it |
//! | `catalog` | the catalog in a real etcd: written once, by one coordinator, and read whole |
//! | `restored` | an etcd that is put back to an older state |
//! | `again` | a coordinator that lost its role and takes it again |
//! | `lease` | the lease in a real etcd: one holder at a time, whoever dies or is stopped |
//! | `job` | a training job with a rank on each host, and what it said |

mod again;
mod catalog;
mod copies;
mod ending;
mod failover;
mod fixed;
mod guarded;
mod job;
mod lease;
mod links;
mod members;
mod net;
mod nodes;
mod remembered;
mod restored;
mod silent;
mod site;
mod tier3;
mod tree;
mod twin;
